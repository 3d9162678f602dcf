#include "moesh/estimate/layer_time.h"

#include <algorithm>
#include <cmath>

#include "moesh/base/error.h"

namespace moesh::estimate {

namespace {

// All of these were measured on one H200 (bench/results/step_parts_h200.md has the rows, and how
// well the formulas meet them). Other GPUs are taken to reach the same part of their peaks.
constexpr double kPeak = 989e12, kFloat8Peak = 1979e12,
                 kBandwidth = 4.8e12;  // NVIDIA's numbers for an H200

// FLOPs and bytes a second. Where both overlap, the time is the root of the sum of the squares of
// both times; else their sum.
struct Rate {
  double flops, bytes;
  bool overlap = false;
};

// Steady, at the power limit, where training runs.
Rate rate_of(WorkKind kind) {
  switch (kind) {
    case WorkKind::experts: return {660e12, 4.0e12, true};
    case WorkKind::dense: return {700e12, 4.0e12, true};
    case WorkKind::float8_experts:
    case WorkKind::float8_dense: return {1150e12, 4.0e12, true};
    case WorkKind::attention: return {540e12, 4.0e12};
    case WorkKind::narrow_attention: return {420e12, 4.0e12};
    case WorkKind::window_attention: return {120e12, 4.0e12};
    case WorkKind::masked_attention: return {131e12, 4.0e12};
    case WorkKind::delta_rule: return {87e12, 4.0e12};
    case WorkKind::large_pass:
    case WorkKind::pass_of_step: return {kPeak, 4.0e12};
    case WorkKind::rows: return {kPeak, 4.0e12};
    case WorkKind::pass: break;
  }
  return {kPeak, 3.0e12};
}
bool is_float8(WorkKind kind) {
  return kind == WorkKind::float8_experts || kind == WorkKind::float8_dense;
}
double flops_a_second(WorkKind kind, const Cluster& gpu) {
  if (!is_float8(kind)) return rate_of(kind).flops / kPeak * gpu.peak_flops;
  MOESH_CHECK(gpu.peak_float8_flops > 0, ErrorKind::config, gpu.gpu,
              " multiplies no float8: there training.float8 and training.float8_dense round and "
              "then multiply in training.dtype, which is slower than without and is not timed; "
              "leave both out, or give peak_float8_tflops in the cluster's file");
  return rate_of(kind).flops / kFloat8Peak * gpu.peak_float8_flops;
}

}  // namespace

double seconds(const KernelWork& work, const Cluster& gpu) {
  const Rate rate = rate_of(work.kind);
  const double products = (work.flops + work.wasted) / flops_a_second(work.kind, gpu),
               bytes = work.bytes / (rate.bytes / kBandwidth * gpu.memory_bandwidth);
  return rate.overlap ? std::hypot(products, bytes) : products + bytes;
}

double seconds_of_large_pass(double bytes, const Cluster& gpu) {
  return seconds({WorkKind::large_pass, 0, bytes}, gpu);
}

void Compute::add(const Compute& c, double times) {
  experts += times * c.experts, attention += times * c.attention, dense += times * c.dense;
  passes += times * c.passes, moving += times * c.moving;
}

Compute compute_of(const WorkLedger& work, const Cluster& gpu, double part_of_step) {
  Compute c;
  for (const auto& [kernel, count] : work) {
    const double times = kernel.kind == WorkKind::pass_of_step ? part_of_step * count : count,
                 time = times * seconds(kernel, gpu);
    switch (kernel.kind) {
      case WorkKind::experts:
      case WorkKind::float8_experts: c.experts += time; break;
      case WorkKind::dense:
      case WorkKind::float8_dense: c.dense += time; break;
      case WorkKind::pass:
      case WorkKind::large_pass:
      case WorkKind::pass_of_step: c.passes += time; break;
      case WorkKind::rows: c.passes += time, c.moving += time; break;
      default: c.attention += time;
    }
  }
  return c;
}

double seconds_of_weight_gradients(const WorkLedger& forward, const Cluster& gpu) {
  double sum = 0;
  for (const auto& [kernel, count] : forward) {
    KernelWork product = kernel;
    if (kernel.kind == WorkKind::float8_experts) product.kind = WorkKind::experts;
    if (kernel.kind == WorkKind::float8_dense) product.kind = WorkKind::dense;
    if (product.kind == WorkKind::experts || product.kind == WorkKind::dense)
      sum += count * seconds(product, gpu);
  }
  return sum;
}

double least_seconds_of_experts(const PassWork& work, const Cluster& gpu) {
  double seconds = 0;
  for (const WorkLedger* ledger : {&work.forward, &work.again, &work.backward})
    for (const auto& [kernel, count] : *ledger)
      if (kernel.kind == WorkKind::experts || kernel.kind == WorkKind::float8_experts)
        seconds += count * kernel.flops / flops_a_second(kernel.kind, gpu);
  return seconds;
}

void add_to(pipeline::Lane& lane, const DirectionTime& p, const DirectionTime& forward) {
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

// A GPU computes this much slower while rows travel: the part of its multiprocessors that moves
// them (DeepSeek-V3's report, 3.2.2: 20 of 132).
constexpr double kPartThatMoves = 20.0 / 132;

double gain_of_turns(const std::vector<pipeline::Lane>& lanes) {
  double apart = 0;
  for (const pipeline::Lane& lane : lanes) apart += pipeline::seconds_apart(lane);
  return std::max(0.0, apart - pipeline::seconds_in_turns(lanes, kPartThatMoves));
}

bool shares_gathers(const Config& config, const MeshShape& mesh) {
  return mesh.pp > 1 && !config.parallelism.fsdp_reshard_after_forward;
}

namespace {

// What a pass hides beside another one like it, in a model of many such layers.
double hidden_in_pairs(const DirectionTime& p, const DirectionTime& forward) {
  constexpr int kLayers = 16;
  pipeline::Lane lane;
  for (int i = 0; i < kLayers; ++i) add_to(lane, p, forward);
  return std::min(p.travel(), gain_of_turns({lane, lane}) / (2 * kLayers));
}

// Passes over parameters that are gathered, and gradients that are reduced and added up: bytes.
struct ParameterBytes {
  double gather = 0, gradients = 0;
};
ParameterBytes parameter_bytes(const PartProfile& p, const LayerContext& s) {
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

double seconds_of(const LayerContext& s, const comm::Ledger::value_type& entry) {
  const auto& [key, traffic] = entry;
  return seconds(s.cluster, group_shape(s.cluster, s.mesh, axes_of(key.first)), key.second,
                 static_cast<double>(traffic.num_bytes), static_cast<double>(traffic.num_calls));
}

void add_traffic(const comm::Ledger& traffic, const LayerContext& s, DirectionTime& to) {
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
void hide_keys(const comm::Ledger& traffic, const LayerContext& s, double attention,
               DirectionTime& of) {
  const models::ModelFacts facts = models::facts(s.config.model.architecture);
  if (facts.sends_latents || facts.num_kv_heads / s.mesh.tp % 2 != 0) return;
  double keys = 0;
  for (const auto& entry : traffic)
    if (axes_of(entry.first.first) == cp) keys += seconds_of(s, entry);
  of.tensor -= std::min(keys, attention) / 2;
}

}  // namespace

LayerTime parts_of(const PartProfile& p, const LayerContext& s) {
  LayerTime out;
  const double of_step = s.moves_parameters ? 1 / static_cast<double>(s.num_micro) : 0;
  const Compute forward = compute_of(p.work.forward, s.cluster, of_step),
                again = compute_of(p.work.again, s.cluster),
                backward = compute_of(p.work.backward, s.cluster);
  for (const Compute* c : {&forward, &again, &backward}) out.compute.add(*c);
  out.again = again.all();
  out.weights = seconds_of_weight_gradients(p.work.forward, s.cluster);
  out.forward.at_experts = forward.at_experts();
  out.forward.before = forward.all() - forward.at_experts();
  out.backward.before = again.all() - again.at_experts();
  out.backward.at_experts = again.at_experts() + backward.at_experts();
  out.backward.after = backward.all() - backward.at_experts();
  const comm::Ledger& in_forward_pass = p.work.sent_in_forward;
  comm::Ledger in_backward_pass = p.traffic;
  add(in_backward_pass, in_forward_pass, -1);
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

LayerTime parts_of_end(PartProfile ends, double part, bool is_first, const LayerContext& s) {
  const auto take = [part](std::int64_t& n) {
    n = static_cast<std::int64_t>(part * static_cast<double>(n));
  };
  for (StateMemory* state : {&ends.dense, &ends.experts}) *state = StateMemory().plus(*state, part);
  for (comm::Ledger* traffic : {&ends.traffic, &ends.work.sent_in_forward})
    for (auto& [key, entry] : *traffic) take(entry.num_calls), take(entry.num_bytes);
  if (part < 1 && is_first) ends.work.forward.clear(), ends.work.again.clear();
  if (part < 1 && !is_first) ends.work.backward.clear();
  LayerTime parts = parts_of(ends, s);
  parts.weights = 0;
  return parts;
}

}  // namespace moesh::estimate
