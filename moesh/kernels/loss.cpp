#include "moesh/kernels/loss.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

at::ScalarType check_logits(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  MOESH_CHECK(logits_NV.defined() && logits_NV.dim() == 2 && logits_NV.is_contiguous() &&
                  is_kernel_dtype(logits_NV.scalar_type()),
              ErrorKind::data, "logits_NV is ", describe(logits_NV),
              "; pass contiguous float64, float32 or bfloat16 [tokens, words]");
  check_tensor("label_N", label_N, at::kLong, 1);
  check_same_device("label_N", label_N, "logits_NV", logits_NV);
  MOESH_CHECK(label_N.size(0) == logits_NV.size(0), ErrorKind::data, "label_N is ",
              describe(label_N), " for logits ", describe(logits_NV),
              "; there is a label for each token");
  return logits_NV.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

LogitSums logit_sums(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  check_logits(logits_NV, label_N);
  const at::NoGradGuard no_grad;
  return kernels_for(logits_NV.device()).logit_sums(logits_NV, label_N.contiguous());
}

at::Tensor logit_gradient_(const at::Tensor& logits_NV, const at::Tensor& label_N,
                           const at::Tensor& total_N, const at::Tensor& weight_N) {
  const auto wide = check_logits(logits_NV, label_N);
  check_tensor("total_N", total_N, wide, 1);
  check_tensor("weight_N", weight_N, wide, 1);
  MOESH_CHECK(total_N.size(0) == label_N.size(0) && weight_N.size(0) == label_N.size(0),
              ErrorKind::data, "total_N is ", describe(total_N), " and weight_N ",
              describe(weight_N), " for ", label_N.size(0), " tokens");
  const at::NoGradGuard no_grad;
  return kernels_for(logits_NV.device())
      .logit_gradient_(logits_NV, label_N.contiguous(), total_N.contiguous(),
                       weight_N.contiguous());
}

}  // namespace moesh::kernels
