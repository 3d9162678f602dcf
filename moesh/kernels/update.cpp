#include "moesh/kernels/update.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

bool is_wide(const at::Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble);
}

void check_param(const AdamWParam& p, const at::Tensor& step) {
  MOESH_CHECK(is_wide(p.value), ErrorKind::data, "AdamW: value is ", describe(p.value),
              "; master weights are float32 or float64");
  for (const auto* t : {&p.value, &p.gradient, &p.mean, &p.mean_square})
    MOESH_CHECK(t->defined() && t->numel() == p.value.numel() &&
                    (t->scalar_type() == p.value.scalar_type() ||
                     (t == &p.gradient && t->scalar_type() == at::kBFloat16)) &&
                    t->device() == step.device() && t->is_contiguous(),
                ErrorKind::data, "AdamW: a tensor is ", describe(*t), " beside a value of ",
                describe(p.value),
                "; pass contiguous ones of one size, type and device; a gradient may be bfloat16");
  if (p.copy.defined())
    MOESH_CHECK(p.copy.scalar_type() == at::kBFloat16 && p.copy.numel() == p.value.numel() &&
                    p.copy.device() == p.value.device() && p.copy.is_contiguous(),
                ErrorKind::data, "AdamW: copy is ", describe(p.copy), " beside a value of ",
                describe(p.value), "; pass a contiguous bfloat16 tensor of its size");
}

}  // namespace

void adamw_(const AdamWNumbers& numbers, const std::vector<AdamWParam>& params) {
  check_tensor("the numbers of the step", numbers.step, at::kDouble, 1);
  MOESH_CHECK(numbers.step.numel() == 4, ErrorKind::data, "AdamW: ", numbers.step.numel(),
              " numbers of the step; pass learning rate, number, factor and skip");
  for (const auto& p : params) check_param(p, numbers.step);
  if (params.empty()) return;
  const at::NoGradGuard no_grad;
  kernels_for(numbers.step.device()).adamw_(numbers, params);
  // Written behind autograd's back.
  for (const auto& p : params)
    for (const auto* t : {&p.value, &p.mean, &p.mean_square})
      t->unsafeGetTensorImpl()->bump_version();
}

at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors, at::Device device) {
  std::vector<at::Tensor> all;
  for (const auto& t : tensors) {
    MOESH_CHECK(
        t.defined() && is_kernel_dtype(t.scalar_type()) && t.device().type() == device.type(),
        ErrorKind::data, "a sum of squares of ", describe(t),
        "; pass float64, float32 or bfloat16 tensors on ", device);
    if (t.numel() > 0) all.push_back(t.contiguous());
  }
  const at::NoGradGuard no_grad;
  if (all.empty()) return at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
  return kernels_for(device).sum_of_squares(all);
}

void cast_all(const std::vector<Cast>& casts) {
  std::vector<Cast> plain;
  for (const auto& [to, from] : casts) {
    MOESH_CHECK(to.defined() && from.defined() && to.sizes() == from.sizes() &&
                    to.device() == from.device() && to.device() == casts[0].to.device() &&
                    to.is_contiguous(),
                ErrorKind::data, "a cast of ", describe(from), " into ", describe(to),
                "; pass contiguous memory of one shape and device");
    plain.push_back({to, from.contiguous()});
  }
  if (casts.empty()) return;
  const at::NoGradGuard no_grad;
  kernels_for(casts[0].to.device()).cast_all(plain);
}

void cast_into(const at::Tensor& to, const at::Tensor& from) { cast_all({{to, from}}); }

at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) {
  if (x.scalar_type() == dtype) return x;
  const at::Tensor out = at::empty(x.sizes(), x.options().dtype(dtype));
  cast_into(out, x);
  return out;
}

}  // namespace moesh::kernels
