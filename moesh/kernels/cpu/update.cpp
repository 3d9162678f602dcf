// AdamW and the sum of squares on the CPU. AdamW is one pass over the memory, with the same
// instructions for all elements, so that no bit depends on where a shard begins. (ATen's kernels
// use fused multiply-add in their vector loop and not in its remainder.)

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "moesh/kernels/cpu/tasks.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::cpu {
namespace {

constexpr std::int64_t kGrain = 1 << 16;

template <class V, class G>
void update(const AdamWNumbers& n, const AdamWParam& p) {
  const auto* step = n.step.const_data_ptr<double>();
  const double lr = step[0], t = step[1];
  const auto factor = static_cast<V>(step[2]);
  const auto keep = static_cast<V>(1 - lr * p.weight_decay);
  const auto beta1 = static_cast<V>(n.beta1), beta2 = static_cast<V>(n.beta2);
  const auto rest1 = static_cast<V>(1 - n.beta1), rest2 = static_cast<V>(1 - n.beta2);
  const auto rate = static_cast<V>(lr / (1 - std::pow(n.beta1, t)));
  const auto root = static_cast<V>(1 / std::sqrt(1 - std::pow(n.beta2, t)));
  const auto eps = static_cast<V>(n.eps);
  V *w = p.value.mutable_data_ptr<V>(), *m = p.mean.mutable_data_ptr<V>(),
    *v = p.mean_square.mutable_data_ptr<V>();
  const G* gradient = p.gradient.const_data_ptr<G>();
  run_ranges(p.value.numel(), kGrain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const V g = static_cast<V>(gradient[i]) * factor;
      m[i] = beta1 * m[i] + rest1 * g;
      v[i] = beta2 * v[i] + rest2 * g * g;
      w[i] = keep * w[i] - rate * m[i] / (root * std::sqrt(v[i]) + eps);
    }
  });
  if (p.copy.defined()) p.copy.view(p.value.sizes()).copy_(p.value);
}

// By chunks, whose sums are added in order. Eight sums side by side are what a vector holds.
template <class V>
double squares(const at::Tensor& x) {
  constexpr int kLanes = 8;
  const std::int64_t size = x.numel(), num_chunks = (size + kGrain - 1) / kGrain;
  std::vector<double> sums(static_cast<std::size_t>(num_chunks));
  const V* data = x.const_data_ptr<V>();
  run_ranges(size, kGrain, [&](std::int64_t begin, std::int64_t end) {
    double lanes[kLanes] = {};
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto value = static_cast<double>(data[i + lane]);
        lanes[lane] += value * value;
      }
    for (; i < end; ++i) lanes[0] += static_cast<double>(data[i]) * static_cast<double>(data[i]);
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    sums[static_cast<std::size_t>(begin / kGrain)] = sum;
  });
  double sum = 0;
  for (const double s : sums) sum += s;
  return sum;
}

}  // namespace

void adamw_(const AdamWNumbers& numbers, const std::vector<AdamWParam>& params) {
  if (numbers.step.const_data_ptr<double>()[3] != 0) return;
  for (const auto& p : params) {
    const bool is_double = p.value.scalar_type() == at::kDouble;
    if (p.gradient.scalar_type() == at::kBFloat16)
      is_double ? update<double, at::BFloat16>(numbers, p)
                : update<float, at::BFloat16>(numbers, p);
    else
      is_double ? update<double, double>(numbers, p) : update<float, float>(numbers, p);
  }
}

at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const auto& t : tensors) {
    const auto dtype = t.scalar_type();
    sum += dtype == at::kDouble  ? squares<double>(t)
           : dtype == at::kFloat ? squares<float>(t)
                                 : squares<at::BFloat16>(t);
  }
  at::Tensor out = at::empty({}, at::kDouble);
  *out.mutable_data_ptr<double>() = sum;
  return out;
}

}  // namespace moesh::kernels::cpu
