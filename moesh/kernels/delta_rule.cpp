#include "moesh/kernels/delta_rule.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_starts(const at::Tensor& starts_BL, const at::Tensor& x) {
  if (!starts_BL.defined()) return;
  check_tensor("starts_BL", starts_BL, at::kLong, 2);
  MOESH_CHECK(starts_BL.sizes() == x.sizes().slice(0, 2) && starts_BL.is_contiguous(),
              ErrorKind::internal, "starts of documents are ", describe(starts_BL), " for tokens ",
              describe(x), "; there is one for each token, and they are contiguous");
}

void check(const DeltaRuleInput& in, std::int64_t chunk) {
  const auto& qkv = in.qkv_BLgc;
  MOESH_CHECK(
      qkv.dim() == 4 && is_kernel_dtype(qkv.scalar_type()) && qkv.size(1) >= 1 &&
          in.decay_BLh.dim() == 3 && in.key_dim >= 1 && qkv.size(2) >= 1 &&
          in.decay_BLh.size(2) % qkv.size(2) == 0 && in.value_dim() >= 1 &&
          qkv.size(2) * (qkv.size(3) - 2 * in.key_dim) == in.decay_BLh.size(2) * in.value_dim(),
      ErrorKind::internal, "delta rule: q, k and v are ", describe(qkv), ", with keys of ",
      in.key_dim, ", for decays ", describe(in.decay_BLh),
      "; they are [batch, tokens, key heads, 2 keys and the values of its value heads]");
  for (const at::Tensor* t : {&in.decay_BLh, &in.beta_BLh}) {
    check_tensor("decay or beta", *t, wide(qkv), 3);
    MOESH_CHECK(
        t->sizes() == in.decay_BLh.sizes() && t->sizes().slice(0, 2) == qkv.sizes().slice(0, 2),
        ErrorKind::internal, "delta rule: decay or beta is ", describe(*t), " for ", describe(qkv));
  }
  MOESH_CHECK(!in.state_Bhdv.defined() || in.state_Bhdv.sizes() == in.state_sizes(),
              ErrorKind::internal, "delta rule: the state is ", describe(in.state_Bhdv), " for ",
              describe(qkv), " with keys of ", in.key_dim);
  MOESH_CHECK(chunk >= 1, ErrorKind::internal, "delta rule: chunks of ", chunk,
              " tokens; they have 1 or more");
  check_starts(in.starts_BL, qkv);
}

void check_convolution(const at::Tensor& x, const at::Tensor& w, const at::Tensor& starts_BL) {
  MOESH_CHECK(x.dim() == 4 && is_kernel_dtype(x.scalar_type()), ErrorKind::internal, "x is ",
              describe(x), "; a convolution takes [batch, tokens, heads, channels]");
  check_tensor("w", w, wide(x), 3);
  MOESH_CHECK(w.sizes().slice(0, 2) == x.sizes().slice(2, 2) && w.size(2) >= 1, ErrorKind::internal,
              "w is ", describe(w), " for x ", describe(x),
              "; a convolution has its taps for each channel of each head");
  check_starts(starts_BL, x);
}

}  // namespace

std::int64_t DeltaRuleInput::value_dim() const {
  const std::int64_t group = decay_BLh.size(2) / qkv_BLgc.size(2);
  return (qkv_BLgc.size(3) - 2 * key_dim) / group;
}
std::array<std::int64_t, 4> DeltaRuleInput::y_sizes() const {
  return {qkv_BLgc.size(0), qkv_BLgc.size(1), decay_BLh.size(2), value_dim()};
}
std::array<std::int64_t, 4> DeltaRuleInput::state_sizes() const {
  return {qkv_BLgc.size(0), decay_BLh.size(2), key_dim, value_dim()};
}

DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& input, std::int64_t chunk) {
  check(input, chunk);
  const at::NoGradGuard no_grad;
  return kernels_for(input.qkv_BLgc.device()).delta_rule_forward(input, chunk);
}

DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& input, const at::Tensor& dy_BLhv,
                                       std::int64_t chunk) {
  check(input, chunk);
  MOESH_CHECK(dy_BLhv.sizes() == input.y_sizes(), ErrorKind::internal, "delta rule: dy is ",
              describe(dy_BLhv), " for ", describe(input.qkv_BLgc));
  const at::NoGradGuard no_grad;
  return kernels_for(input.qkv_BLgc.device()).delta_rule_backward(input, dy_BLhv, chunk);
}

at::Tensor convolution_forward(const at::Tensor& x, const at::Tensor& w,
                               const at::Tensor& starts_BL) {
  check_convolution(x, w, starts_BL);
  const at::NoGradGuard no_grad;
  return kernels_for(x.device()).convolution_forward(x, w, starts_BL);
}

ConvolutionGradients convolution_backward(const at::Tensor& x, const at::Tensor& w,
                                          const at::Tensor& starts_BL, const at::Tensor& dy) {
  check_convolution(x, w, starts_BL);
  const at::NoGradGuard no_grad;
  return kernels_for(x.device()).convolution_backward(x, w, starts_BL, dy);
}

}  // namespace moesh::kernels
