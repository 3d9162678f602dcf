#include <ATen/TensorOperators.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/mul.h>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {

at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h) {
  at::Tensor with_sinks = at::logaddexp(lse, sinks_h.unsqueeze(1));
  const at::Tensor share = (lse - with_sinks).exp_().transpose(-2, -1);
  at::Tensor out = y;
  at::mul_out(out, y, share.unsqueeze(-1));
  return with_sinks;
}

at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h,
                         const at::Tensor& dy) {
  const at::Tensor dot = dy.to(lse.scalar_type()).mul(y).sum(at::IntArrayRef{-1}).transpose(-2, -1);
  const at::Tensor share = (sinks_h.unsqueeze(1) - lse).exp_();
  return share.mul_(dot).movedim(-2, 0).flatten(1).sum(1).neg_();
}

}  // namespace moesh::kernels::aten
