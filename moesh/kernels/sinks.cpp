#include "moesh/kernels/sinks.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_sinks(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h) {
  const auto wide = [&] { return y.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; };
  const auto fits = [&] {
    auto sizes = y.sizes().vec();  // [.., L, h]
    sizes.pop_back();
    std::swap(sizes[sizes.size() - 2], sizes[sizes.size() - 1]);
    return lse.sizes() == at::IntArrayRef(sizes) && sinks_h.dim() == 1 &&
           sinks_h.size(0) == y.size(-2);
  };
  MOESH_CHECK(y.defined() && y.dim() >= 3 && is_kernel_dtype(y.scalar_type()) && lse.defined() &&
                  sinks_h.defined() && lse.scalar_type() == wide() &&
                  sinks_h.scalar_type() == wide() && fits(),
              ErrorKind::data, "sinks are ", describe(sinks_h), " and lse ", describe(lse),
              " beside attention's result ", describe(y),
              "; pass y [.., L, h, d], lse [.., h, L] and sinks [h], the last two as float32");
}

}  // namespace

at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h) {
  check_sinks(y, lse, sinks_h);
  const at::NoGradGuard no_grad;
  return kernels_for(y.device()).add_sinks_(y, lse.contiguous(), sinks_h.contiguous());
}

at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h,
                         const at::Tensor& dy) {
  check_sinks(y, lse, sinks_h);
  MOESH_CHECK(dy.defined() && dy.sizes() == y.sizes() && dy.scalar_type() == y.scalar_type(),
              ErrorKind::data, "the gradient of attention's result ", describe(y), " is ",
              describe(dy), "; pass one of its shape and dtype");
  const at::NoGradGuard no_grad;
  return kernels_for(y.device())
      .sink_gradient(y.contiguous(), lse.contiguous(), sinks_h.contiguous(), dy.contiguous());
}

}  // namespace moesh::kernels
