#include "moesh/estimate/step_time.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "moesh/base/error.h"

namespace moesh::estimate {
namespace {

// Seconds of one micro-batch on a rank, of a layer or of a stage.
struct Parts {
  double compute = 0;          // forward and backward, with what is computed again
  double forward_compute = 0;  // part of it
  double tensor = 0;           // collectives of tp and cp
  double experts = 0;          // of ep and etp
  double storage = 0;          // gathering parameters and reducing gradients, as far as it shows
  double forward_storage = 0;  // part of it

  void add(const Parts& p, double times = 1) {
    compute += times * p.compute, forward_compute += times * p.forward_compute;
    tensor += times * p.tensor, experts += times * p.experts;
    storage += times * p.storage, forward_storage += times * p.forward_storage;
  }
  double all() const { return compute + tensor + experts + storage; }
};

bool recomputes(const Config& c) { return c.activation_checkpoint.mode == "full"; }

double seconds_of_flops(double flops, const Cluster& cluster) {
  return flops / (cluster.peak_flops * cluster.efficiency);
}

// The head is not computed again, whatever the blocks do.
Parts parts_of_head(double flops, const Cluster& cluster) {
  const double seconds = seconds_of_flops(flops, cluster);
  return {.compute = seconds, .forward_compute = seconds / 3};
}

// FLOPs of each layer for a token, on the cp ranks whose queries see most: the others wait for them
// in every layer.
std::vector<double> flops_of_longest(const Config& config, const ModelShape& model,
                                     const MeshShape& mesh) {
  std::vector<double> flops = model.layer_flops;
  if (mesh.cp == 1) return flops;
  const SequenceCut cut = sequence_cut(config, model.sees, mesh.cp);
  for (size_t i = 0; i < flops.size(); ++i)
    if (const auto& o = model.sees[i])
      flops[i] +=
          model.scores[i] * (nn::longest_share(*o, config.data.sequence_length, mesh.cp, cut) - 1);
  return flops;
}

// Where micro-batches of a pipeline share gathered parameters, a step gathers them once.
bool shares_gathers(const Config& config, const MeshShape& mesh) {
  return mesh.pp > 1 && !config.parallelism.fsdp_reshard_after_forward;
}
double gathers_of_a_micro_batch(const Config& config, const MeshShape& mesh,
                                std::int64_t num_micro) {
  return shares_gathers(config, mesh) ? 1.0 / static_cast<double>(num_micro) : 1.0;
}

// The part of the micro-batches whose rows travel behind the compute of another one: of an odd
// number the last has none beside it.
double part_in_pairs(const Config& config, const MeshShape& mesh, std::int64_t num_micro) {
  if (!config.parallelism.overlap_experts || mesh.pp > 1 || mesh.ep * mesh.etp == 1) return 0;
  return static_cast<double>(num_micro / 2 * 2) / static_cast<double>(num_micro);
}

// FLOPs of a layer's attention for a token, behind which keys and values of other cp ranks travel:
// those of half the heads behind the attention of the others.
double scores_beside_keys(const Config& config, const ModelShape& model, const MeshShape& mesh,
                          size_t layer) {
  const models::ModelFacts facts = models::facts(config.model.architecture);
  const bool in_halves = !facts.sends_latents && facts.num_kv_heads / mesh.tp % 2 == 0;
  return mesh.cp > 1 && in_halves ? model.scores[layer] / 2 : 0;
}

Parts parts_of(const PartProfile& p, double flops, const Config& config, const Cluster& cluster,
               const MeshShape& mesh, double gathers_of_each = 1, double in_pairs = 0,
               double scores = 0) {
  Parts out;
  const double times = recomputes(config) ? 4.0 / 3 : 1;
  out.forward_compute = seconds_of_flops(flops, cluster) / 3;
  out.compute = seconds_of_flops(flops, cluster) * times;
  double gathers = 0, keys = 0;
  for (const auto& [key, entry] : p.traffic) {
    const Axes axes = axes_of(key.first);
    double time =
        seconds(cluster, group_shape(cluster, mesh, axes), key.second,
                static_cast<double>(entry.num_bytes), static_cast<double>(entry.num_calls));
    if ((axes & (dp_replicate | dp_shard | efsdp)) != none) {
      const bool is_gather = key.second == comm::Collective::all_gather;
      if (is_gather) time *= gathers_of_each;
      out.storage += time;
      if (is_gather) gathers += time;
    } else if ((axes & (ep | ep_nodes | ep_inside | etp)) != none) {
      out.experts += time;
    } else {
      out.tensor += time;
      if (axes == cp) keys += time;
    }
  }
  out.tensor -= std::min(keys / 2, seconds_of_flops(scores, cluster) * times);
  out.experts -= in_pairs * std::min(out.experts, out.compute);
  // The parameters of the next block travel while this one computes, forward and backward, and
  // gradients are reduced while backward goes on.
  const bool again = !shares_gathers(config, mesh) &&
                     (config.parallelism.fsdp_reshard_after_forward || recomputes(config));
  const double in_forward = again ? gathers / 2 : gathers, in_backward = out.storage - in_forward,
               can_hide =
                   config.parallelism.overlap_reductions ? in_backward : gathers - in_forward;
  out.forward_storage = in_forward - std::min(in_forward, out.forward_compute);
  out.storage =
      out.forward_storage + in_backward - std::min(can_hide, out.compute - out.forward_compute);
  return out;
}

pipeline::StageCosts costs_of(const Parts& p, const Config& config) {
  // Collectives of the layers are the same in forward, in backward, and in a forward that is run
  // again.
  const double forward_share = recomputes(config) ? 1.0 / 3 : 1.0 / 2;
  pipeline::StageCosts c;
  c.forward = p.forward_compute + p.forward_storage + forward_share * (p.tensor + p.experts);
  const double backward = p.all() - c.forward;
  c.backward_weight = p.forward_compute;  // as many products as in forward
  c.backward_input = backward - c.backward_weight;
  return c;
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

// A step on a mesh, before any schedule is gone through.
struct Pipe {
  int stages_of_a_rank = 1;
  std::int64_t num_micro = 1;
  pipeline::StagePlan plan;
  std::vector<Parts> stages;
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

pipeline::Schedule schedule_of(const Pipe& pipe, const MeshShape& mesh, const std::string& schedule,
                               std::int64_t num_micro) {
  return pipeline::make_schedule(mesh.pp == 1 ? "1f1b" : schedule, mesh.pp, pipe.stages_of_a_rank,
                                 static_cast<int>(num_micro));
}

// Whether any rank sends to its place in another stage over the network: pp is the slowest axis.
bool crosses_nodes(const Cluster& cluster, const MeshShape& mesh, int from, int to) {
  const int width = mesh.num_ranks() / mesh.pp;
  for (int i = 0; i < width; ++i)
    if ((from * width + i) / cluster.gpus_per_node != (to * width + i) / cluster.gpus_per_node)
      return true;
  return false;
}

Pipe make_pipe(Profiler& profiler, const Cluster& cluster, const MeshShape& mesh,
               const std::string& schedule, Stages stages) {
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const int num_layers = static_cast<int>(model.is_moe.size());
  const std::string& given = config.parallelism.pipeline_parallel_layers_per_stage;
  Pipe pipe{.stages_of_a_rank = num_stages_of_a_rank(mesh, given, schedule, num_layers),
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
  const double gathers_of_each = gathers_of_a_micro_batch(config, mesh, pipe.num_micro),
               in_pairs = part_in_pairs(config, mesh, pipe.num_micro);
  const std::vector<double> layer_flops = flops_of_longest(config, model, mesh);
  std::map<std::pair<bool, double>, Parts> known;  // layers of one kind are alike
  const auto layer_parts = [&](size_t i) {
    const std::pair key(model.is_moe[i], layer_flops[i]);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
    return known[key] = parts_of(profile.layers.at(key.first), tokens * key.second, config, cluster,
                                 mesh, gathers_of_each, in_pairs,
                                 tokens * scores_beside_keys(config, model, mesh, i));
  };
  const Parts ends = parts_of(profile.ends, 0, config, cluster, mesh);
  const Parts head = parts_of_head(tokens * model.head_flops, cluster);
  size_t layer = 0;
  for (size_t s = 0; s < pipe.plan.size(); ++s) {
    Parts stage;
    StateMemory state;
    double activations = 0, kept = 0, gathered = 0;
    for (int i = 0; i < pipe.plan[s]; ++i, ++layer) {
      const PartProfile& p = profile.layers.at(model.is_moe[layer]);
      stage.add(layer_parts(layer));
      add(state, p.dense), add(state, p.experts);
      activations += p.activations, kept += p.kept, gathered += p.gathered;
    }
    const bool is_first = s == 0, is_last = s + 1 == pipe.plan.size();
    const double both = is_first && is_last ? 1 : 0;
    add(state, profile.ends.dense,
        both + (1 - both) * (is_first * model.of_first + is_last * model.of_last));
    if (is_last) add(state, profile.ends.experts);
    const double traffic_of_first = std::min(0.5, model.of_first);
    stage.add(ends,
              both + (1 - both) * (is_first * traffic_of_first + is_last * (1 - traffic_of_first)));
    pipeline::StageCosts c = costs_of(stage, config);
    if (is_last) {  // backward of the head follows its forward at once
      stage.add(head);
      c.forward += head.all();
    }
    pipe.stages.push_back(stage);
    pipe.state.push_back(state);
    pipe.always.push_back(is_last    ? profile.always
                          : is_first ? profile.always_on_first
                                     : profile.always_between);
    pipe.gathered.push_back(gathered);
    c.activation = in_pairs > 0 ? 2 * activations : activations;
    c.kept_for_weights = c.activation == 0 ? 0 : kept / c.activation;
    pipe.costs.stages.push_back(c);
  }
  const double bytes_of_number = config.training.dtype == "bfloat16"  ? 2
                                 : config.training.dtype == "float64" ? 8
                                                                      : 4;
  const double held = config.parallelism.sequence_parallel ? tokens : tokens * mesh.tp;
  const double num_bytes = held * static_cast<double>(model.dim) * bytes_of_number;
  const auto rank_of = schedule_of(pipe, mesh, schedule, 1).rank_of;
  for (size_t s = 0; s + 1 < rank_of.size(); ++s)
    pipe.costs.stages[s].transfer =
        num_bytes / (crosses_nodes(cluster, mesh, rank_of[s], rank_of[s + 1])
                         ? cluster.network_bandwidth
                         : cluster.node_bandwidth) +
        cluster.latency;
  return pipe;
}

// After so many micro-batches each further one takes as long as on the slowest rank.
std::int64_t enough_micro(const Pipe& pipe, const MeshShape& mesh) {
  const std::int64_t enough = 4 * mesh.pp;  // and none is left over from groups of pp
  return pipe.num_micro <= enough ? pipe.num_micro : enough + pipe.num_micro % mesh.pp;
}

// What no order of the actions undercuts, with parameters and gradients moved in no time: a rank
// works on all micro-batches, after the first has come to it through the stages before; where
// backward is whole, the last one goes back through these afterwards.
double fewest_seconds(const Pipe& pipe, const std::vector<Parts>& work,
                      const std::vector<int>& rank_of, const std::string& schedule) {
  const bool in_halves = pipeline::has_halves(schedule);
  std::vector<bool> is_seen(work.size(), false);
  double before = 0, most = 0;
  for (size_t s = 0; s < pipe.stages.size(); ++s) {
    const auto rank = static_cast<size_t>(rank_of[s]);
    const Parts& w = work[rank];
    if (!is_seen[rank])
      most = std::max(most, before + static_cast<double>(pipe.num_micro) * (w.all() - w.storage));
    is_seen[rank] = true;
    const Parts& stage = pipe.stages[s];
    before += in_halves ? pipe.costs.stages[s].forward - stage.forward_storage
                        : stage.all() - stage.storage;
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
                              {"batch_size", {t.batch_size}},
                              {"ranks", {std::int64_t{t.mesh.num_ranks()}}},
                              {"tokens", {t.num_tokens}},
                              {"micro_batches", {t.num_micro_batches}},
                              {"layers", {std::move(layers)}},
                              {"seconds", {t.total}},
                              {"compute", {t.compute}},
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

// Nothing where no schedule, and no size of a micro-batch, gives more than `least` tokens a second.
std::optional<StepTime> timed(Profiler& profiler, const Cluster& cluster, const MeshShape& shape,
                              const std::string& schedule, Stages stages, double least) {
  const MeshShape mesh = shape.validated();
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const Pipe pipe = make_pipe(profiler, cluster, mesh, schedule, stages);
  const std::int64_t simulated_micro = enough_micro(pipe, mesh);
  const auto order = schedule_of(pipe, mesh, schedule, simulated_micro);

  std::vector<Parts> work(static_cast<size_t>(mesh.pp));
  std::vector<StateMemory> state(work.size());
  std::vector<double> always(work.size()), gathered(work.size());
  for (size_t s = 0; s < pipe.stages.size(); ++s) {
    const auto rank = static_cast<size_t>(order.rank_of[s]);
    work[rank].add(pipe.stages[s]);
    add(state[rank], pipe.state[s]);
    always[rank] = std::max(always[rank], pipe.always[s]);
    gathered[rank] += pipe.gathered[s];
  }
  const Parts& longest = *std::max_element(
      work.begin(), work.end(), [](const Parts& a, const Parts& b) { return a.all() < b.all(); });
  const auto num_micro = static_cast<double>(pipe.num_micro);
  StepTime out{.mesh = mesh,
               .schedule = schedule,
               .recompute = config.activation_checkpoint.mode,
               .batch_size = config.data.batch_size,
               .num_tokens = static_cast<std::int64_t>(mesh.dp_replicate) * mesh.dp_shard *
                             config.data.batch_size * config.data.sequence_length * pipe.num_micro,
               .num_micro_batches = pipe.num_micro,
               .layers = pipe.plan,
               .compute = num_micro * longest.compute,
               .tensor = num_micro * longest.tensor,
               .experts = num_micro * longest.experts,
               .storage = num_micro * longest.storage};
  const double fastest = fewest_seconds(pipe, work, order.rank_of, schedule);
  if (static_cast<double>(out.num_tokens) <= least * fastest) return std::nullopt;
  const auto simulation = pipeline::simulate(order, pipe.costs);
  for (size_t r = 0; r < work.size(); ++r) {
    // GPipe holds all micro-batches; the others no more than were simulated.
    const double alive =
        schedule == "gpipe" && mesh.pp > 1 ? num_micro / static_cast<double>(simulated_micro) : 1;
    out.peak = std::max(out.peak, static_cast<double>(state[r].total()) +
                                      alive * simulation.peak[r] + always[r] + gathered[r]);
    // Weights and moments are read and written, gradients read.
    out.update = std::max(
        out.update,
        static_cast<double>(2 * state[r].weights + state[r].gradients + 2 * state[r].optimizer) /
            cluster.memory_bandwidth);
  }
  const double whole =
      simulation.time + static_cast<double>(pipe.num_micro - simulated_micro) * longest.all();
  out.bubble = std::max(0.0, whole - num_micro * longest.all());  // not -0 by rounding
  double busy = 0;
  for (const Parts& p : work) busy += num_micro * p.all();
  out.waiting = std::max(0.0, 1 - busy / (whole * mesh.pp));
  out.total = whole + out.update;
  out.peak_flops = cluster.peak_flops;
  out.flops = static_cast<double>(out.num_tokens) *
              std::accumulate(model.layer_flops.begin(), model.layer_flops.end(), model.head_flops);
  return out;
}

}  // namespace

StepTime step_time(Profiler& profiler, const Cluster& cluster, const MeshShape& mesh,
                   const std::string& schedule) {
  return *timed(profiler, cluster, mesh, schedule, stages_of(mesh, schedule), 0);
}

// What only stages have takes further dry runs, and changes the memory but not the time.
std::optional<StepTime> step_time_above(Profiler& profiler, const Cluster& cluster,
                                        const MeshShape& mesh, const std::string& schedule,
                                        double least, double limit) {
  auto time = timed(profiler, cluster, mesh, schedule, Stages::one, least);
  if (!time || mesh.pp == 1 || time->tokens_per_second() <= least) return time;
  const bool is_least = profiler.config().parallelism.fsdp_reshard_after_forward;
  if (is_least && time->peak > limit) return time;
  return timed(profiler, cluster, mesh, schedule, stages_of(mesh, schedule), least);
}

pipeline::Simulation simulated(Profiler& profiler, const Cluster& cluster, const MeshShape& shape,
                               const std::string& schedule, int most) {
  const MeshShape mesh = shape.validated();
  const Pipe pipe = make_pipe(profiler, cluster, mesh, schedule, stages_of(mesh, schedule));
  return pipeline::simulate(
      schedule_of(pipe, mesh, schedule, std::min<std::int64_t>(pipe.num_micro, most)), pipe.costs);
}

double fastest_tokens_per_second(Profiler& profiler, const Cluster& cluster,
                                 const MeshShape& shape) {
  const MeshShape mesh = shape.validated();
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const double tokens = static_cast<double>(config.data.batch_size * config.data.sequence_length),
               of_rank = tokens / (mesh.cp * mesh.tp);
  const Profile profile = profiler.on(mesh);
  const std::vector<double> layer_flops = flops_of_longest(config, model, mesh);
  Parts sum;
  for (size_t i = 0; i < model.is_moe.size(); ++i)
    sum.add(parts_of(profile.layers.at(model.is_moe[i]), of_rank * layer_flops[i], config, cluster,
                     mesh, 1, 0, of_rank * scores_beside_keys(config, model, mesh, i)));
  sum.add(parts_of_head(of_rank * model.head_flops, cluster));
  return tokens * mesh.dp_replicate * mesh.dp_shard / (sum.compute + sum.tensor + sum.experts);
}

}  // namespace moesh::estimate
