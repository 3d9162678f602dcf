#include "moesh/kernels/swiglu.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_like(const char* name, const at::Tensor& t, const at::Tensor& gate) {
  MOESH_CHECK(gate.defined() && is_kernel_dtype(gate.scalar_type()) && t.defined() &&
                  t.sizes() == gate.sizes() && t.scalar_type() == gate.scalar_type() &&
                  t.device() == gate.device(),
              ErrorKind::data, name, " is ", describe(t), " beside a gate ", describe(gate),
              "; pass both as float64, float32 or bfloat16 of one shape");
}

}  // namespace

at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  check_like("up", up, gate);
  const at::NoGradGuard no_grad;
  return kernels_for(gate.device()).swiglu_forward(gate.contiguous(), up.contiguous());
}

SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up,
                                const at::Tensor& dh) {
  check_like("up", up, gate);
  check_like("dh", dh, gate);
  const at::NoGradGuard no_grad;
  return kernels_for(gate.device())
      .swiglu_backward(gate.contiguous(), up.contiguous(), dh.contiguous());
}

}  // namespace moesh::kernels
