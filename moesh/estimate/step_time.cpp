#include "moesh/estimate/step_time.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/estimate/layer_time.h"

namespace moesh::estimate {
namespace {

// The loss and its gradients are computed in forward, and nothing of them again.
pipeline::StageCosts costs_of(const LayerTime& p) {
  return {.forward = p.forward.all(),
          .backward_input = p.backward.all() - p.weights,
          .backward_weight = p.weights};
}

BackwardOrder stages_of(const MeshShape& mesh, const std::string& schedule) {
  const bool in_halves = pipeline::has_halves(schedule);
  return mesh.pp == 1          ? BackwardOrder::one
         : in_halves           ? BackwardOrder::in_halves
         : schedule == "gpipe" ? BackwardOrder::after_all
                               : BackwardOrder::soon;
}

// Whether forwards and backwards of a pipeline are under way at once.
bool is_joined(const Order& order, const MeshShape& mesh) {
  return order.overlap_experts && mesh.pp > 1 && mesh.ep * mesh.etp > 1 &&
         pipeline::can_be_joined(order.schedule);
}

// A stage, or all stages of a rank.
struct PipeStage {
  LayerTime work;
  double ends = 0;  // computing embedding, head and loss
  StateMemory state;
  double always = 0;    // bytes that do not depend on how many micro-batches live
  double gathered = 0;  // parameters that its micro-batches share

  void add(const PipeStage& s) {
    work.add(s.work);
    ends += s.ends, gathered += s.gathered;
    state = state.plus(s.state);
    always = std::max(always, s.always);
  }
};

// A step on a mesh, before any schedule is gone through.
struct Pipe {
  std::int64_t num_micro = 1;
  pipeline::StagePlan plan;
  train::PipelineOptions options;
  std::vector<PipeStage> stages;
  pipeline::Costs costs;
};

pipeline::Schedule schedule_of(const Pipe& pipe, const MeshShape& mesh, std::int64_t num_micro) {
  return train::schedule_of(pipe.options, mesh.pp, static_cast<std::size_t>(num_micro));
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
               const Order& order, BackwardOrder stages) {
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  Pipe pipe{.num_micro =
                config::num_micro_batches(config, std::int64_t{mesh.dp_replicate} * mesh.dp_shard),
            .plan = config::stage_plan(config, mesh.pp, order.schedule, model.flops)};
  pipe.options = {.schedule = order.schedule,
                  .stages_of_a_rank = static_cast<int>(pipe.plan.size()) / mesh.pp,
                  .overlap_experts = is_joined(order, mesh)};
  const double tokens = static_cast<double>(config.data.batch_size * config.data.sequence_length) /
                        (mesh.cp * mesh.tp);
  MeshShape layer_mesh = mesh;
  layer_mesh.pp = 1;
  const Profile profile = profiler.on(layer_mesh, stages);
  const LayerContext setting{
      .config = config,
      .cluster = cluster,
      .mesh = mesh,
      .num_micro = pipe.num_micro,
      .in_pairs = LayerContext::pairs(order.overlap_experts, mesh, pipe.num_micro)};
  std::map<bool, LayerTime> layer_parts;
  for (const auto& [is_moe, p] : profile.layers) layer_parts[is_moe] = parts_of(p, setting);
  size_t layer = 0;
  for (size_t s = 0; s < pipe.plan.size(); ++s) {
    PipeStage& stage = pipe.stages.emplace_back();
    pipeline::Lane forward, backward;
    double activations = 0, kept = 0;
    for (int i = 0; i < pipe.plan[s]; ++i, ++layer) {
      const PartProfile& p = profile.layers.at(model.is_moe[layer]);
      const LayerTime& parts = layer_parts.at(model.is_moe[layer]);
      stage.work.add(parts);
      pipeline::Lane of_layer;
      add_to(of_layer, parts.backward, parts.forward);
      backward.insert(backward.begin(), of_layer.begin(), of_layer.end());
      add_to(forward, parts.forward, parts.forward);
      stage.state = stage.state.plus(p.dense).plus(p.experts);
      activations += p.activations, kept += p.kept, stage.gathered += p.gathered;
    }
    const bool is_first = s == 0, is_last = s + 1 == pipe.plan.size();
    const double both = is_first && is_last ? 1 : 0;
    stage.state =
        stage.state.plus(profile.ends.dense,
                         both + (1 - both) * (is_first * model.of_first + is_last * model.of_last));
    if (is_last) stage.state = stage.state.plus(profile.ends.experts);
    LayerTime end;
    if (is_first || is_last) {
      const double of_first = std::min(0.5, model.of_first);
      end = parts_of_end(profile.ends,
                         both == 1  ? 1
                         : is_first ? of_first
                                    : 1 - of_first,
                         is_first, setting);
    }
    stage.work.add(end);
    forward.push_back({.compute = end.forward.compute()});
    backward.insert(is_first ? backward.end() : backward.begin(),
                    {.compute = end.backward.compute()});
    stage.ends = end.compute.all();
    stage.always = is_last    ? profile.always
                   : is_first ? profile.always_on_first
                              : profile.always_between;
    pipeline::StageCosts c = costs_of(stage.work);
    if (pipe.options.overlap_experts) {  // rows of each that the other hides
      const double hidden = gain_of_turns({backward, forward}),
                   travel = stage.work.forward.travel() + stage.work.backward.travel();
      c.forward_links = travel == 0 ? 0 : hidden * stage.work.forward.travel() / travel;
      c.backward_links = hidden - c.forward_links;
    }
    c.activation = setting.in_pairs > 0 ? 2 * activations : activations;
    c.kept_for_weights = kept;
    pipe.costs.stages.push_back(c);
  }
  const double bytes_of_number = config.training.dtype == "bfloat16"  ? 2
                                 : config.training.dtype == "float64" ? 8
                                                                      : 4;
  const double held = config.parallelism.sequence_parallel ? tokens : tokens * mesh.tp;
  const double num_bytes = held * static_cast<double>(model.dim) * bytes_of_number;
  const auto rank_of = schedule_of(pipe, mesh, 1).rank_of;
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
std::int64_t enough_micro(const Pipe& pipe, const MeshShape& mesh) {
  if (pipe.options.overlap_experts) return pipe.num_micro;
  const std::int64_t enough = 4 * mesh.pp;  // and none is left over from groups of pp
  return pipe.num_micro <= enough ? pipe.num_micro : enough + pipe.num_micro % mesh.pp;
}

// What no order of the actions undercuts, with parameters and gradients moved in no time: a rank
// works on all micro-batches, after the first has come to it through the stages before; where
// backward is whole, the last one goes back through these afterwards.
double fewest_seconds(const Pipe& pipe, const std::vector<PipeStage>& ranks,
                      const std::vector<int>& rank_of) {
  const bool in_halves = pipeline::has_halves(pipe.options.schedule);
  std::vector<bool> is_seen(ranks.size(), false);
  double before = 0, most = 0;
  for (size_t s = 0; s < pipe.stages.size(); ++s) {
    const auto rank = static_cast<size_t>(rank_of[s]);
    const LayerTime& w = ranks[rank].work;
    if (!is_seen[rank])
      most = std::max(most,
                      before + static_cast<double>(pipe.num_micro) *
                                   (w.all() - w.storage() -
                                    (pipe.options.overlap_experts ? w.between() + w.inside() : 0)));
    is_seen[rank] = true;
    const LayerTime& stage = pipe.stages[s].work;
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
                              const Order& how, BackwardOrder stages, double least) {
  const MeshShape mesh = shape.validated();
  const std::string& schedule = how.schedule;
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const Pipe pipe = make_pipe(profiler, cluster, mesh, how, stages);
  const std::int64_t simulated_micro = enough_micro(pipe, mesh);
  const auto order = schedule_of(pipe, mesh, simulated_micro);

  std::vector<PipeStage> ranks(static_cast<size_t>(mesh.pp));
  for (size_t s = 0; s < pipe.stages.size(); ++s)
    ranks[static_cast<size_t>(order.rank_of[s])].add(pipe.stages[s]);
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
  const double fastest = fewest_seconds(pipe, ranks, order.rank_of);
  if (static_cast<double>(out.num_tokens) <= least * fastest) return std::nullopt;
  const auto simulation = pipeline::simulate(order, pipe.costs);
  std::vector<double> busy;
  for (size_t r = 0; r < ranks.size(); ++r) {
    busy.push_back(simulation.busy[r] + num_more * ranks[r].work.all());
    // GPipe holds all micro-batches; the others no more than were simulated.
    const double alive =
        schedule == "gpipe" && mesh.pp > 1 ? num_micro / static_cast<double>(simulated_micro) : 1;
    out.peak =
        std::max(out.peak, static_cast<double>(ranks[r].state.total()) +
                               alive * simulation.peak[r] + ranks[r].always + ranks[r].gathered);
    // Weights and moments are read and written, gradients read for their norm, and once more. Those
    // of one micro-batch on one rank are in the type of the work.
    const double of_gradients =
        mesh.num_ranks() * pipe.num_micro == 1 && config.training.dtype == "bfloat16" ? 1 : 2;
    const double bytes =
        static_cast<double>(2 * ranks[r].state.weights + 2 * ranks[r].state.optimizer) +
        of_gradients * static_cast<double>(ranks[r].state.gradients);
    out.update = std::max(out.update, seconds_of_large_pass(bytes, cluster));
  }
  out.update += seconds_of_muon(model, mesh.num_ranks(), cluster);
  const auto busiest = std::max_element(busy.begin(), busy.end()) - busy.begin();
  const LayerTime& longest = ranks[static_cast<size_t>(busiest)].work;
  const double longest_busy = busy[static_cast<size_t>(busiest)],
               whole = simulation.time + num_more * longest.all();
  out.compute = num_micro * longest.compute.all(), out.tensor = num_micro * longest.tensor();
  out.storage = num_micro * longest.storage();
  // Rows are what joined actions hide.
  out.experts = num_micro * longest.rows() - (num_micro * longest.all() - longest_busy);
  out.kernels.add(longest.compute, num_micro);
  out.again = num_micro * longest.again;
  out.ends = num_micro * ranks[static_cast<size_t>(busiest)].ends;
  out.bubble = std::max(0.0, whole - longest_busy);  // not -0 by rounding
  out.waiting =
      std::max(0.0, 1 - std::accumulate(busy.begin(), busy.end(), 0.0) / (whole * mesh.pp));
  out.total = whole + out.update;
  out.peak_flops = cluster.peak_flops;
  out.flops =
      static_cast<double>(out.num_tokens) *
      std::accumulate(model.flops.layers.begin(), model.flops.layers.end(), model.flops.head);
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
  auto time = timed(profiler, cluster, mesh, order, BackwardOrder::one, least);
  if (!time || mesh.pp == 1 || time->tokens_per_second() <= least) return time;
  const bool is_least = profiler.config().parallelism.fsdp_reshard_after_forward;
  if (is_least && time->peak > limit) return time;
  return timed(profiler, cluster, mesh, order, stages_of(mesh, order.schedule), least);
}

pipeline::Simulation simulated(Profiler& profiler, const Cluster& cluster, const MeshShape& shape,
                               const Order& order, int most) {
  const MeshShape mesh = shape.validated();
  const Pipe pipe = make_pipe(profiler, cluster, mesh, order, stages_of(mesh, order.schedule));
  return pipeline::simulate(schedule_of(pipe, mesh, std::min<std::int64_t>(pipe.num_micro, most)),
                            pipe.costs);
}

double fastest_tokens_per_second(Profiler& profiler, const Cluster& cluster, const MeshShape& shape,
                                 bool with_any_ep) {
  const MeshShape mesh = shape.validated();
  const Config& config = profiler.config();
  const ModelShape& model = profiler.model();
  const double tokens = static_cast<double>(config.data.batch_size * config.data.sequence_length);
  const Profile profile = profiler.on(mesh);
  const LayerContext setting{
      .config = config, .cluster = cluster, .mesh = mesh, .moves_parameters = false};
  LayerTime sum;
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
