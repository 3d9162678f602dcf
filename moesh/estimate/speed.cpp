#include "moesh/estimate/speed.h"

#include <cmath>

namespace moesh::estimate {
namespace {

// All of these were measured on one H200 (bench/results/step_parts_h200.md has the rows, and how
// well the formulas meet them). Other GPUs are taken to reach the same part of their peaks.
constexpr double kPeak = 989e12, kBandwidth = 4.8e12;  // NVIDIA's numbers for an H200

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
    case WorkKind::attention: return {540e12, 4.0e12};
    case WorkKind::narrow_attention: return {420e12, 4.0e12};
    case WorkKind::window_attention: return {120e12, 4.0e12};
    case WorkKind::masked_attention: return {131e12, 4.0e12};
    case WorkKind::delta_rule: return {87e12, 4.0e12};
    case WorkKind::large_pass: return {kPeak, 4.0e12};
    case WorkKind::rows: return {kPeak, 4.0e12};
    case WorkKind::pass: break;
  }
  return {kPeak, 3.0e12};
}
double flops_a_second(WorkKind kind, const Cluster& gpu) {
  return rate_of(kind).flops / kPeak * gpu.peak_flops;
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

Compute compute_of(const WorkLedger& work, const Cluster& gpu) {
  Compute c;
  for (const auto& [kernel, count] : work) {
    const double time = count * seconds(kernel, gpu);
    switch (kernel.kind) {
      case WorkKind::experts: c.experts += time; break;
      case WorkKind::dense: c.dense += time; break;
      case WorkKind::pass:
      case WorkKind::large_pass: c.passes += time; break;
      case WorkKind::rows: c.passes += time, c.moving += time; break;
      default: c.attention += time;
    }
  }
  return c;
}

double least_seconds_of_experts(const PassWork& work, const Cluster& gpu) {
  double seconds = 0;
  for (const WorkLedger* ledger : {&work.forward, &work.again, &work.backward})
    for (const auto& [kernel, count] : *ledger)
      if (kernel.kind == WorkKind::experts)
        seconds += count * kernel.flops / flops_a_second(kernel.kind, gpu);
  return seconds;
}

}  // namespace moesh::estimate
