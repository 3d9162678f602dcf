#include "moesh/estimate/speed.h"

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

// DeepSeek-V3's report, 3.2.2: 20 of 132 multiprocessors move what travels.
const double kPartThatMoves = 20.0 / 132;

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

}  // namespace moesh::estimate
