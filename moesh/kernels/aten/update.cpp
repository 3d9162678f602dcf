// AdamW, the sum of squares and casts by LibTorch's kernels.

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <map>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

/// Parameters that move by one call.
struct Lists {
  std::vector<at::Tensor> w, g, m, v;
};

// The numbers of the step become float32 here.
void fused(const AdamWNumbers& n, double weight_decay, const Lists& l) {
  const auto scalar = [&](std::int64_t i) { return n.step.select(0, i).to(at::kFloat); };
  const at::Tensor divisor = n.step.select(0, 2).reciprocal().to(at::kFloat);
  // All may be one: the kernel takes from it what a skipped step has added, and it is not read
  // after that.
  const std::vector<at::Tensor> numbers(l.w.size(), scalar(1));
  at::_fused_adamw_(l.w, l.g, l.m, l.v, {}, numbers, scalar(0), n.beta1, n.beta2, weight_decay,
                    n.eps, /*amsgrad=*/false, /*maximize=*/false, divisor, scalar(3));
}

// Plain operations, in float64 throughout.
void plain(const AdamWNumbers& n, const AdamWParam& p) {
  const at::Tensor lr = n.step.select(0, 0), t = n.step.select(0, 1), skip = n.step.select(0, 3);
  const at::Tensor g = kernels::cast(p.gradient, at::kDouble) * n.step.select(0, 2);
  const at::Tensor m = p.mean * n.beta1 + g * (1 - n.beta1),
                   v = p.mean_square * n.beta2 + g * g * (1 - n.beta2);
  const at::Tensor rate = lr / (1 - at::pow(n.beta1, t)), root = (1 - at::pow(n.beta2, t)).rsqrt();
  const at::Tensor w = p.value * (1 - lr * p.weight_decay) - rate * m / (root * v.sqrt() + n.eps);
  const auto write = [&](const at::Tensor& to, const at::Tensor& value) {
    at::Tensor(to).copy_(at::where(skip.ne(0), to, value));
  };
  write(p.value, w), write(p.mean, m), write(p.mean_square, v);
}

}  // namespace

void adamw_(const AdamWNumbers& numbers, const std::vector<AdamWParam>& params) {
  std::map<double, Lists> lists;  // by weight decay
  std::vector<at::Tensor> copies, copied;
  for (const auto& p : params) {
    if (p.copy.defined()) {
      copies.push_back(p.copy.view(p.value.sizes()));
      copied.push_back(p.value);
    }
    if (p.value.scalar_type() == at::kDouble) {
      plain(numbers, p);
      continue;
    }
    auto& l = lists[p.weight_decay];
    l.w.push_back(p.value), l.g.push_back(kernels::cast(p.gradient, at::kFloat));
    l.m.push_back(p.mean), l.v.push_back(p.mean_square);
  }
  for (const auto& [weight_decay, l] : lists) fused(numbers, weight_decay, l);
  if (!copies.empty()) at::_foreach_copy_(copies, copied);
}

void cast_all(const std::vector<Cast>& casts) {
  for (const auto& [to, from] : casts) at::Tensor(to).copy_(from);
}

at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors) {
  return at::stack(at::_foreach_norm(tensors, 2, at::kDouble)).square_().sum();
}

void add_update(KernelTable& t) {
  t.cast_all = cast_all;
  t.adamw_ = adamw_;
  t.sum_of_squares = sum_of_squares;
}

}  // namespace moesh::kernels::aten
