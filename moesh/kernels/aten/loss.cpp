#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {

LogitSums logit_sums(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  const auto wide = logits_NV.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto options = logits_NV.options().dtype(wide);
  const std::int64_t N = logits_NV.size(0);
  if (logits_NV.size(1) == 0)
    return {at::full({N}, -INFINITY, options), at::zeros({N}, options), at::zeros({N}, options)};
  const at::Tensor x = logits_NV.to(wide), max_N = x.amax(1);
  return {max_N, (x - max_N.unsqueeze(1)).exp_().sum(1),
          x.gather(1, label_N.clamp_min(0).unsqueeze(1)).squeeze(1) * label_N.ge(0).to(wide)};
}

at::Tensor logit_gradient_(const at::Tensor& logits_NV, const at::Tensor& label_N,
                           const at::Tensor& total_N, const at::Tensor& weight_N) {
  if (logits_NV.size(1) == 0) return logits_NV;
  const auto wide = total_N.scalar_type();
  const at::Tensor d = logits_NV.to(wide);  // itself where it is wide
  d.sub_(total_N.unsqueeze(1)).exp_();
  d.scatter_add_(1, label_N.clamp_min(0).unsqueeze(1), -label_N.ge(0).to(wide).unsqueeze(1));
  d.mul_(weight_N.unsqueeze(1));
  return d.is_same(logits_NV) ? logits_NV : logits_NV.copy_(d);
}

void add_loss(KernelTable& t) {
  t.logit_sums = logit_sums;
  t.logit_gradient_ = logit_gradient_;
}

}  // namespace moesh::kernels::aten
