#include "moesh/estimate/step_time.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/pipeline/lanes.h"

namespace moesh::estimate {
namespace {

// Seconds of one micro-batch on a rank in one direction, by what goes on beside what.
struct Pass {
  double before = 0;               // computing until rows go to their experts
  double at_experts = 0;           // with rows that have come there
  double after = 0;                // when they are home
  double between = 0, inside = 0;  // rows between nodes, and inside those of two hops
  double hidden = 0;               // of these, behind what another micro-batch computes
  double apart = 0;                // rows over etp, which nothing hides
  double tensor = 0;               // collectives of tp and cp
  double storage = 0;  // gathering parameters and reducing gradients, as far as it shows

  double compute() const { return before + at_experts + after; }
  double travel() const { return between + inside; }
  double rows() const { return travel() - hidden + apart; }
  double all() const { return compute() + rows() + tensor + storage; }
  void add(const Pass& p, double times = 1) {
    before += times * p.before, at_experts += times * p.at_experts, after += times * p.after;
    between += times * p.between, inside += times * p.inside, hidden += times * p.hidden;
    apart += times * p.apart, tensor += times * p.tensor, storage += times * p.storage;
  }
};

// Seconds of both directions, of a layer or of a stage.
struct Parts {
  Pass forward, backward;
  Compute compute;     // of both, by kernels
  double again = 0;    // part of it: forward once more, in backward
  double weights = 0;  // part of backward: gradients of weights, which can be left for later

  void add(const Parts& p, double times = 1) {
    forward.add(p.forward, times), backward.add(p.backward, times);
    compute.add(p.compute, times);
    again += times * p.again, weights += times * p.weights;
  }
  double all() const { return forward.all() + backward.all(); }
  double between() const { return forward.between + backward.between; }
  double inside() const { return forward.inside + backward.inside; }
  double rows() const { return forward.rows() + backward.rows(); }
  double tensor() const { return forward.tensor + backward.tensor; }
  double storage() const { return forward.storage + backward.storage; }
};

// What a layer does in one direction. As many rows come home as go there in forward; the others of
// backward go there with them. In forward their counts come first, for which the rank waits, behind
// rows that are under way (their own time is among that of the rows).
void add_to(pipeline::Lane& lane, const Pass& p, const Pass& forward) {
  const double home = std::min(p.between, forward.between / 2),
               home_inside = std::min(p.inside, forward.inside / 2),
               counts = &p == &forward ? 1e-9 : 0;
  lane.push_back({.compute = p.before, .message = counts, .takes_turns = false});
  lane.push_back({.message = p.between - home});
  const auto link = pipeline::RowLink::inside;
  if (p.inside > 0) lane.push_back({.message = counts, .link = link, .takes_turns = false});
  lane.push_back({.message = p.inside - home_inside, .link = link});
  lane.push_back({.compute = p.at_experts, .message = p.apart, .takes_turns = false});
  lane.push_back({.message = home_inside, .link = link});
  lane.push_back({.message = home});
  lane.push_back({.compute = p.after});
}

// How much sooner two lanes end that take turns.
double gain_of_turns(const std::vector<pipeline::Lane>& lanes) {
  double apart = 0;
  for (const pipeline::Lane& lane : lanes) apart += pipeline::seconds_apart(lane);
  return std::max(0.0, apart - pipeline::seconds_in_turns(lanes, kPartThatMoves));
}

// What a pass hides beside another one like it, in a model of many such layers.
double hidden_in_pairs(const Pass& p, const Pass& forward) {
  constexpr int kLayers = 16;
  pipeline::Lane lane;
  for (int i = 0; i < kLayers; ++i) add_to(lane, p, forward);
  return std::min(p.travel(), gain_of_turns({lane, lane}) / (2 * kLayers));
}

// Where micro-batches of a pipeline share gathered parameters, a step gathers them once.
bool shares_gathers(const Config& config, const MeshShape& mesh) {
  return mesh.pp > 1 && !config.parallelism.fsdp_reshard_after_forward;
}

// A step as far as the time of a layer depends on it.
struct Setting {
  const Config& config;
  const Cluster& cluster;
  MeshShape mesh;
  std::int64_t num_micro = 1;
  double in_pairs = 0;  // the part of the micro-batches which have another one beside them
  bool moves_parameters = true;

  // The last of an odd number has none.
  static double pairs(bool overlaps, const MeshShape& mesh, std::int64_t num_micro) {
    if (!overlaps || mesh.pp > 1 || mesh.ep * mesh.etp == 1) return 0;
    return static_cast<double>(num_micro / 2 * 2) / static_cast<double>(num_micro);
  }
  double gathers_of_each() const {
    return shares_gathers(config, mesh) ? 1 / static_cast<double>(num_micro) : 1;
  }
  bool gathers_again() const {
    return !shares_gathers(config, mesh) && (config.parallelism.fsdp_reshard_after_forward ||
                                             config.activation_checkpoint.mode == "full");
  }
};

// Passes over parameters that are gathered, and gradients that are reduced and added up: bytes.
struct ParameterBytes {
  double gather = 0, gradients = 0;
};
ParameterBytes parameter_bytes(const PartProfile& p, const Setting& s) {
  constexpr double kMaster = 4;                                   // bytes of a number at rest
  const double later = 1 - 1 / static_cast<double>(s.num_micro);  // that are not the first
  ParameterBytes bytes;
  for (const auto& [state, axes] :
       {std::pair(&p.dense, fsdp), std::pair(&p.experts, Axes(efsdp))}) {
    const double n = s.mesh.size(axes), weights = static_cast<double>(state->weights) / kMaster,
                 gradients = static_cast<double>(state->gradients) / kMaster;
    if (n == 1) {  // casts are among the kernels; float32 sums begin with the second
      bytes.gradients += 18 * later * gradients;
      continue;
    }
    bytes.gather += 6 * weights + 4 * n * weights;  // cast, and taken out of the message
    bytes.gradients += (6 * n + 12 * later + 8 * (1 - later)) * gradients;  // packed, added
  }
  return bytes;
}

double seconds_of(const Setting& s, const comm::Ledger::value_type& entry) {
  const auto& [key, traffic] = entry;
  return seconds(s.cluster, group_shape(s.cluster, s.mesh, axes_of(key.first)), key.second,
                 static_cast<double>(traffic.num_bytes), static_cast<double>(traffic.num_calls));
}

void add_traffic(const comm::Ledger& traffic, const Setting& s, Pass& to) {
  for (const auto& entry : traffic) {
    const Axes axes = axes_of(entry.first.first);
    if ((axes & (dp_replicate | dp_shard | efsdp)) != none) continue;
    const bool is_row = (axes & (ep | ep_nodes | ep_inside | etp)) != none,
               is_between = (axes & (ep | ep_nodes)) != none,
               is_inside = (axes & ep_inside) != none;
    (!is_row      ? to.tensor
     : is_between ? to.between
     : is_inside  ? to.inside
                  : to.apart) += seconds_of(s, entry);
  }
}

// Keys and values of half the heads travel behind attention of the others; latents do not.
void hide_keys(const comm::Ledger& traffic, const Setting& s, double attention, Pass& of) {
  const models::ModelFacts facts = models::facts(s.config.model.architecture);
  if (facts.sends_latents || facts.num_kv_heads / s.mesh.tp % 2 != 0) return;
  double keys = 0;
  for (const auto& entry : traffic)
    if (axes_of(entry.first.first) == cp) keys += seconds_of(s, entry);
  of.tensor -= std::min(keys, attention) / 2;
}

comm::Ledger without(comm::Ledger all, const comm::Ledger& some) {
  for (const auto& [key, entry] : some) {
    all[key].num_bytes -= entry.num_bytes;
    all[key].num_calls -= entry.num_calls;
  }
  return all;
}

Parts parts_of(const PartProfile& p, const Setting& s) {
  Parts out;
  const Compute forward = compute_of(p.work.forward, s.cluster),
                again = compute_of(p.work.again, s.cluster),
                backward = compute_of(p.work.backward, s.cluster);
  for (const Compute* c : {&forward, &again, &backward}) out.compute.add(*c);
  out.again = again.all();
  out.weights = forward.experts + forward.dense;  // as many products as in forward
  out.forward.at_experts = forward.at_experts();
  out.forward.before = forward.all() - forward.at_experts();
  out.backward.before = again.all() - again.at_experts();
  out.backward.at_experts = again.at_experts() + backward.at_experts();
  out.backward.after = backward.all() - backward.at_experts();
  const comm::Ledger &in_forward_pass = p.work.sent_in_forward,
                     in_backward_pass = without(p.traffic, in_forward_pass);
  add_traffic(in_forward_pass, s, out.forward);
  add_traffic(in_backward_pass, s, out.backward);
  hide_keys(in_forward_pass, s, forward.attention, out.forward);
  hide_keys(in_backward_pass, s, again.attention + backward.attention, out.backward);

  if (!s.moves_parameters) return out;
  const ParameterBytes bytes = parameter_bytes(p, s);
  const double gather = s.gathers_of_each() * seconds_of_large_pass(bytes.gather, s.cluster),
               rest = (s.gathers_again() ? gather : 0) +
                      seconds_of_large_pass(bytes.gradients, s.cluster);
  out.forward.before += gather, out.backward.after += rest;
  out.compute.passes += gather + rest;

  if (s.in_pairs > 0) {
    out.forward.hidden = s.in_pairs * hidden_in_pairs(out.forward, out.forward);
    out.backward.hidden = s.in_pairs * hidden_in_pairs(out.backward, out.forward);
  }

  // The parameters of the next block travel while this one computes, forward and backward, and
  // gradients are reduced while backward goes on: as far as rows leave the links free.
  double gathers = 0, reductions = 0;
  for (const auto& entry : p.traffic) {
    if ((axes_of(entry.first.first) & (dp_replicate | dp_shard | efsdp)) == none) continue;
    const bool is_gather = entry.first.second == comm::Collective::all_gather;
    (is_gather ? gathers : reductions) +=
        seconds_of(s, entry) * (is_gather ? s.gathers_of_each() : 1);
  }
  const double in_forward = s.gathers_again() ? gathers / 2 : gathers,
               in_backward = gathers - in_forward + reductions,
               can_hide =
                   s.config.parallelism.overlap_reductions ? in_backward : gathers - in_forward;
  const auto shows = [](double all, double can, double free) {
    return all - std::min(can, std::max(0.0, free));
  };
  out.forward.storage = shows(in_forward, in_forward, out.forward.compute() - out.forward.hidden);
  out.backward.storage = shows(in_backward, can_hide, out.backward.compute() - out.backward.hidden);
  return out;
}

// The loss and its gradients are computed in forward, and nothing of them again.
pipeline::StageCosts costs_of(const Parts& p) {
  return {.forward = p.forward.all(),
          .backward_input = p.backward.all() - p.weights,
          .backward_weight = p.weights};
}

std::int64_t micro_batches(const Config& config, const MeshShape& mesh) {
  const auto dp_size = static_cast<std::int64_t>(mesh.dp_replicate) * mesh.dp_shard;
  const std::int64_t global = config.training.global_batch_size;
  if (global == 0) return config.training.gradient_accumulation_steps;
  MOESH_CHECK(global % (dp_size * config.data.batch_size) == 0, ErrorKind::config,
              "training.global_batch_size is ", global, ", and ", dp_size,
              " data-parallel ranks take ", config.data.batch_size,
              " sequences each; choose a multiple of ", dp_size * config.data.batch_size);
  return global / (dp_size * config.data.batch_size);
}

int num_stages_of_a_rank(const MeshShape& mesh, const std::string& given,
                         const std::string& schedule, int num_layers) {
  if (mesh.pp == 1) return 1;
  if (!given.empty()) {
    const auto plan = pipeline::given_plan(given, num_layers);
    MOESH_CHECK(plan.size() % static_cast<size_t>(mesh.pp) == 0, ErrorKind::config,
                "parallelism.pipeline_parallel_layers_per_stage is '", given, "', which makes ",
                plan.size(), " stages of ", num_layers, " layers, and pp is ", mesh.pp,
                "; it takes a multiple of pp stages");
    return static_cast<int>(plan.size()) / mesh.pp;
  }
  const int fixed = pipeline::stages_of_a_rank(schedule);
  return fixed == 0 ? kStagesOfARank : fixed;
}

Stages stages_of(const MeshShape& mesh, const std::string& schedule) {
  const bool in_halves = pipeline::has_halves(schedule);
  return mesh.pp == 1          ? Stages::one
         : in_halves           ? Stages::in_halves
         : schedule == "gpipe" ? Stages::after_all
                               : Stages::soon;
}

// Whether forwards and backwards of a pipeline are under way at once.
bool is_joined(const Order& order, const MeshShape& mesh) {
  return order.overlap_experts && mesh.pp > 1 && mesh.ep * mesh.etp > 1 &&
         pipeline::can_be_joined(order.schedule);
}

// A step on a mesh, before any schedule is gone through.
struct Pipe {
  int stages_of_a_rank = 1;
  std::int64_t num_micro = 1;
  pipeline::StagePlan plan;
  std::vector<Parts> stages;
  std::vector<double> ends;  // of each: computing embedding, head and loss
  pipeline::Costs costs;
  std::vector<StateMemory> state;  // of each stage
  std::vector<double> always;    // of each: bytes that do not depend on how many micro-batches live
  std::vector<double> gathered;  // of each: parameters that its micro-batches share
};

void add(StateMemory& to, const StateMemory& s, double factor = 1) {
  const auto times = [&](std::int64_t n) {
    return static_cast<std::int64_t>(static_cast<double>(n) * factor);
  };
  to.weights += times(s.weights), to.gradients += times(s.gradients);
  to.optimizer += times(s.optimizer);
}

pipeline::Schedule schedule_of(const Pipe& pipe, const MeshShape& mesh, const Order& order,
                               std::int64_t num_micro) {
  return pipeline::make_schedule(mesh.pp == 1 ? "1f1b" : order.schedule, mesh.pp,
                                 pipe.stages_of_a_rank, static_cast<int>(num_micro),
                                 is_joined(order, mesh));
}

// Whether any rank sends to its place in another stage over the network: pp is the slowest axis.
bool crosses_nodes(const Cluster& cluster, const MeshShape& mesh, int from, int to) {
  const int width = mesh.num_ranks() / mesh.pp;
  for (int i = 0; i < width; ++i)
    if ((from * width + i) / cluster.gpus_per_node != (to * width + i) / cluster.gpus_per_node)
      return true;
  return false;
}

// The part of what is around the layers that a stage has: the embedding, whose backward is one, or
// the head, whose backward is in forward.
Parts parts_of_end(PartProfile ends, double part, bool is_first, const Setting& s) {
  const auto take = [part](std::int64_t& n) {
    n = static_cast<std::int64_t>(part * static_cast<double>(n));
  };
  for (StateMemory* state : {&ends.dense, &ends.experts})
    take(state->weights), take(state->gradients), take(state->optimizer);
  for (comm::Ledger* traffic : {&ends.traffic, &ends.work.sent_in_forward})
    for (auto& [key, entry] : *traffic) take(entry.num_calls), take(entry.num_bytes);
  if (part < 1 && is_first) ends.work.forward.clear(), ends.work.again.clear();
  if (part < 1 && !is_first) ends.work.backward.clear();
  Parts parts = parts_of(ends, s);
  parts.weights = 0;
  return parts;
}

Pipe make_pipe(Profiler& profiler, const Cluster& cluster, const MeshShape& mesh,
               const Order& order, Stages stages) {
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const int num_layers = static_cast<int>(model.is_moe.size());
  const std::string& given = config.parallelism.pipeline_parallel_layers_per_stage;
  Pipe pipe{.stages_of_a_rank = num_stages_of_a_rank(mesh, given, order.schedule, num_layers),
            .num_micro = micro_batches(config, mesh)};
  const int num_stages = mesh.pp * pipe.stages_of_a_rank;
  const double tokens = static_cast<double>(config.data.batch_size * config.data.sequence_length) /
                        (mesh.cp * mesh.tp);
  MeshShape layer_mesh = mesh;
  layer_mesh.pp = 1;
  const Profile profile = profiler.on(layer_mesh, stages);
  pipe.plan =
      given.empty() || mesh.pp == 1
          ? pipeline::balanced_plan(
                {.layers = model.layer_flops, .embedding = 0, .head = model.head_flops}, num_stages)
          : pipeline::given_plan(given, num_layers);
  const Setting setting{.config = config,
                        .cluster = cluster,
                        .mesh = mesh,
                        .num_micro = pipe.num_micro,
                        .in_pairs = Setting::pairs(order.overlap_experts, mesh, pipe.num_micro)};
  std::map<bool, Parts> layer_parts;
  for (const auto& [is_moe, p] : profile.layers) layer_parts[is_moe] = parts_of(p, setting);
  size_t layer = 0;
  for (size_t s = 0; s < pipe.plan.size(); ++s) {
    Parts stage;
    pipeline::Lane forward, backward;
    StateMemory state;
    double activations = 0, kept = 0, gathered = 0;
    for (int i = 0; i < pipe.plan[s]; ++i, ++layer) {
      const PartProfile& p = profile.layers.at(model.is_moe[layer]);
      const Parts& parts = layer_parts.at(model.is_moe[layer]);
      stage.add(parts);
      pipeline::Lane of_layer;
      add_to(of_layer, parts.backward, parts.forward);
      backward.insert(backward.begin(), of_layer.begin(), of_layer.end());
      add_to(forward, parts.forward, parts.forward);
      add(state, p.dense), add(state, p.experts);
      activations += p.activations, kept += p.kept, gathered += p.gathered;
    }
    const bool is_first = s == 0, is_last = s + 1 == pipe.plan.size();
    const double both = is_first && is_last ? 1 : 0;
    add(state, profile.ends.dense,
        both + (1 - both) * (is_first * model.of_first + is_last * model.of_last));
    if (is_last) add(state, profile.ends.experts);
    Parts end;
    if (is_first || is_last) {
      const double of_first = std::min(0.5, model.of_first);
      end = parts_of_end(profile.ends,
                         both == 1  ? 1
                         : is_first ? of_first
                                    : 1 - of_first,
                         is_first, setting);
    }
    stage.add(end);
    forward.push_back({.compute = end.forward.compute()});
    backward.insert(is_first ? backward.end() : backward.begin(),
                    {.compute = end.backward.compute()});
    pipe.ends.push_back(end.compute.all());
    pipe.stages.push_back(stage);
    pipe.state.push_back(state);
    pipe.always.push_back(is_last    ? profile.always
                          : is_first ? profile.always_on_first
                                     : profile.always_between);
    pipe.gathered.push_back(gathered);
    pipeline::StageCosts c = costs_of(stage);
    if (is_joined(order, mesh)) {  // rows of each that the other hides
      const double hidden = gain_of_turns({backward, forward}),
                   travel = stage.forward.travel() + stage.backward.travel();
      c.forward_links = travel == 0 ? 0 : hidden * stage.forward.travel() / travel;
      c.backward_links = hidden - c.forward_links;
    }
    c.activation = setting.in_pairs > 0 ? 2 * activations : activations;
    c.kept_for_weights = c.activation == 0 ? 0 : kept / c.activation;
    pipe.costs.stages.push_back(c);
  }
  const double bytes_of_number = config.training.dtype == "bfloat16"  ? 2
                                 : config.training.dtype == "float64" ? 8
                                                                      : 4;
  const double held = config.parallelism.sequence_parallel ? tokens : tokens * mesh.tp;
  const double num_bytes = held * static_cast<double>(model.dim) * bytes_of_number;
  const auto rank_of = schedule_of(pipe, mesh, order, 1).rank_of;
  for (size_t s = 0; s + 1 < rank_of.size(); ++s)
    pipe.costs.stages[s].transfer =
        num_bytes / (crosses_nodes(cluster, mesh, rank_of[s], rank_of[s + 1])
                         ? cluster.network_bandwidth
                         : cluster.node_bandwidth) +
        cluster.latency;
  return pipe;
}

// After so many micro-batches each further one takes as long as on the slowest rank; where some
// are joined, all are gone through.
std::int64_t enough_micro(const Pipe& pipe, const MeshShape& mesh, const Order& order) {
  if (is_joined(order, mesh)) return pipe.num_micro;
  const std::int64_t enough = 4 * mesh.pp;  // and none is left over from groups of pp
  return pipe.num_micro <= enough ? pipe.num_micro : enough + pipe.num_micro % mesh.pp;
}

// What no order of the actions undercuts, with parameters and gradients moved in no time: a rank
// works on all micro-batches, after the first has come to it through the stages before; where
// backward is whole, the last one goes back through these afterwards.
double fewest_seconds(const Pipe& pipe, const std::vector<Parts>& work,
                      const std::vector<int>& rank_of, const Order& order, const MeshShape& mesh) {
  const bool in_halves = pipeline::has_halves(order.schedule);
  std::vector<bool> is_seen(work.size(), false);
  double before = 0, most = 0;
  for (size_t s = 0; s < pipe.stages.size(); ++s) {
    const auto rank = static_cast<size_t>(rank_of[s]);
    const Parts& w = work[rank];
    if (!is_seen[rank])
      most = std::max(most, before + static_cast<double>(pipe.num_micro) *
                                         (w.all() - w.storage() -
                                          (is_joined(order, mesh) ? w.between() + w.inside() : 0)));
    is_seen[rank] = true;
    const Parts& stage = pipe.stages[s];
    before +=
        in_halves ? stage.forward.all() - stage.forward.storage : stage.all() - stage.storage();
  }
  return most;
}

}  // namespace

void check_fills(const MeshShape& mesh, const Cluster& cluster) {
  MOESH_CHECK(mesh.num_ranks() == cluster.num_gpus(), ErrorKind::config, "the mesh has ",
              mesh.num_ranks(), " ranks (", mesh.describe(), "), and the cluster ",
              cluster.num_gpus(), " GPUs; change one of them, or add --search");
}

formats::JsonValue to_json(const StepTime& t) {
  formats::JsonList layers(t.layers.size());
  for (size_t i = 0; i < layers.size(); ++i) layers[i].value = std::int64_t{t.layers[i]};
  return {formats::JsonObject{{"mesh", {t.mesh.describe()}},
                              {"schedule", {t.schedule}},
                              {"recompute", {t.recompute}},
                              {"dispatcher", {t.dispatcher}},
                              {"overlap_experts", {t.overlap_experts}},
                              {"batch_size", {t.batch_size}},
                              {"ranks", {std::int64_t{t.mesh.num_ranks()}}},
                              {"tokens", {t.num_tokens}},
                              {"micro_batches", {t.num_micro_batches}},
                              {"layers", {std::move(layers)}},
                              {"seconds", {t.total}},
                              {"compute", {t.compute}},
                              {"products_of_experts", {t.kernels.experts}},
                              {"attention", {t.kernels.attention}},
                              {"other_products", {t.kernels.dense}},
                              {"passes", {t.kernels.passes}},
                              {"once_more", {t.again}},
                              {"tensor", {t.tensor}},
                              {"experts", {t.experts}},
                              {"storage", {t.storage}},
                              {"bubble", {t.bubble}},
                              {"waiting", {t.waiting}},
                              {"update", {t.update}},
                              {"tokens_per_second", {t.tokens_per_second()}},
                              {"flops_of_a_rank", {t.flops_of_a_rank()}},
                              {"peak", {t.peak}}}};
}

namespace {

// Owners share the matrices of the model evenly; what they send is not counted. The bytes of a
// number, all passes over it together, are those with which a step of the 1 B model on an H200
// takes the 205 ms that it took.
double seconds_of_muon(const ModelShape& model, int num_ranks, const Cluster& gpu) {
  constexpr double kBytes = 300;
  const double part = 1.0 / num_ranks;
  return seconds({WorkKind::dense, part * model.muon_flops, 0}, gpu) +
         seconds_of_large_pass(part * model.muon_numbers * kBytes, gpu);
}

// Nothing where no schedule, and no size of a micro-batch, gives more than `least` tokens a second.
std::optional<StepTime> timed(Profiler& profiler, const Cluster& cluster, const MeshShape& shape,
                              const Order& how, Stages stages, double least) {
  const MeshShape mesh = shape.validated();
  const std::string& schedule = how.schedule;
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const Pipe pipe = make_pipe(profiler, cluster, mesh, how, stages);
  const std::int64_t simulated_micro = enough_micro(pipe, mesh, how);
  const auto order = schedule_of(pipe, mesh, how, simulated_micro);

  std::vector<Parts> work(static_cast<size_t>(mesh.pp));
  std::vector<StateMemory> state(work.size());
  std::vector<double> always(work.size()), gathered(work.size()), ends(work.size());
  for (size_t s = 0; s < pipe.stages.size(); ++s) {
    const auto rank = static_cast<size_t>(order.rank_of[s]);
    work[rank].add(pipe.stages[s]);
    add(state[rank], pipe.state[s]);
    always[rank] = std::max(always[rank], pipe.always[s]);
    gathered[rank] += pipe.gathered[s];
    ends[rank] += pipe.ends[s];
  }
  const auto num_micro = static_cast<double>(pipe.num_micro),
             num_more = num_micro - static_cast<double>(simulated_micro);
  StepTime out{.mesh = mesh,
               .schedule = schedule,
               .recompute = config.activation_checkpoint.mode,
               .batch_size = config.data.batch_size,
               .num_tokens = static_cast<std::int64_t>(mesh.dp_replicate) * mesh.dp_shard *
                             config.data.batch_size * config.data.sequence_length * pipe.num_micro,
               .num_micro_batches = pipe.num_micro,
               .layers = pipe.plan,
               .overlap_experts = how.overlap_experts,
               .dispatcher = config.parallelism.moe_dispatcher};
  const double fastest = fewest_seconds(pipe, work, order.rank_of, how, mesh);
  if (static_cast<double>(out.num_tokens) <= least * fastest) return std::nullopt;
  const auto simulation = pipeline::simulate(order, pipe.costs);
  std::vector<double> busy;
  for (size_t r = 0; r < work.size(); ++r) {
    busy.push_back(simulation.busy[r] + num_more * work[r].all());
    // GPipe holds all micro-batches; the others no more than were simulated.
    const double alive =
        schedule == "gpipe" && mesh.pp > 1 ? num_micro / static_cast<double>(simulated_micro) : 1;
    out.peak = std::max(out.peak, static_cast<double>(state[r].total()) +
                                      alive * simulation.peak[r] + always[r] + gathered[r]);
    // Weights and moments are read and written, gradients read for their norm, and once more. Those
    // of one micro-batch on one rank are in the type of the work.
    const double of_gradients =
        mesh.num_ranks() * pipe.num_micro == 1 && config.training.dtype == "bfloat16" ? 1 : 2;
    const double bytes = static_cast<double>(2 * state[r].weights + 2 * state[r].optimizer) +
                         of_gradients * static_cast<double>(state[r].gradients);
    out.update = std::max(out.update, seconds_of_large_pass(bytes, cluster));
  }
  out.update += seconds_of_muon(model, mesh.num_ranks(), cluster);
  const auto busiest = std::max_element(busy.begin(), busy.end()) - busy.begin();
  const Parts& longest = work[static_cast<size_t>(busiest)];
  const double longest_busy = busy[static_cast<size_t>(busiest)],
               whole = simulation.time + num_more * longest.all();
  out.compute = num_micro * longest.compute.all(), out.tensor = num_micro * longest.tensor();
  out.storage = num_micro * longest.storage();
  // Rows are what joined actions hide.
  out.experts = num_micro * longest.rows() - (num_micro * longest.all() - longest_busy);
  out.kernels.add(longest.compute, num_micro);
  out.again = num_micro * longest.again;
  out.ends = num_micro * ends[static_cast<size_t>(busiest)];
  out.bubble = std::max(0.0, whole - longest_busy);  // not -0 by rounding
  out.waiting =
      std::max(0.0, 1 - std::accumulate(busy.begin(), busy.end(), 0.0) / (whole * mesh.pp));
  out.total = whole + out.update;
  out.peak_flops = cluster.peak_flops;
  out.flops = static_cast<double>(out.num_tokens) *
              std::accumulate(model.layer_flops.begin(), model.layer_flops.end(), model.head_flops);
  return out;
}

}  // namespace

Order order_of(const Config& config) {
  return {config.parallelism.pipeline_parallel_schedule, config.parallelism.overlap_experts};
}

StepTime step_time(Profiler& profiler, const Cluster& cluster, const MeshShape& mesh,
                   const Order& order) {
  return *timed(profiler, cluster, mesh, order, stages_of(mesh, order.schedule), 0);
}

// What only stages have takes further dry runs, and changes the memory but not the time.
std::optional<StepTime> step_time_above(Profiler& profiler, const Cluster& cluster,
                                        const MeshShape& mesh, const Order& order, double least,
                                        double limit) {
  auto time = timed(profiler, cluster, mesh, order, Stages::one, least);
  if (!time || mesh.pp == 1 || time->tokens_per_second() <= least) return time;
  const bool is_least = profiler.config().parallelism.fsdp_reshard_after_forward;
  if (is_least && time->peak > limit) return time;
  return timed(profiler, cluster, mesh, order, stages_of(mesh, order.schedule), least);
}

pipeline::Simulation simulated(Profiler& profiler, const Cluster& cluster, const MeshShape& shape,
                               const Order& order, int most) {
  const MeshShape mesh = shape.validated();
  const Pipe pipe = make_pipe(profiler, cluster, mesh, order, stages_of(mesh, order.schedule));
  return pipeline::simulate(
      schedule_of(pipe, mesh, order, std::min<std::int64_t>(pipe.num_micro, most)), pipe.costs);
}

double fastest_tokens_per_second(Profiler& profiler, const Cluster& cluster, const MeshShape& shape,
                                 bool with_any_ep) {
  const MeshShape mesh = shape.validated();
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const double tokens = static_cast<double>(config.data.batch_size * config.data.sequence_length);
  const Profile profile = profiler.on(mesh);
  const Setting setting{
      .config = config, .cluster = cluster, .mesh = mesh, .moves_parameters = false};
  Parts sum;
  for (const bool is_moe : model.is_moe) sum.add(parts_of(profile.layers.at(is_moe), setting));
  sum.add(parts_of(profile.ends, setting));
  double compute = sum.compute.all();
  if (with_any_ep) {
    double experts = 0;
    for (const bool is_moe : model.is_moe)
      experts += least_seconds_of_experts(profile.layers.at(is_moe).work, cluster);
    compute += experts - sum.compute.experts;
  }
  const double fastest = std::max({compute, sum.between(), sum.inside()}) + sum.forward.apart +
                         sum.backward.apart + sum.tensor();
  return tokens * mesh.dp_replicate * mesh.dp_shard / fastest;
}

}  // namespace moesh::estimate
