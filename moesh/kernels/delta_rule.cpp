#include "moesh/kernels/delta_rule.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_starts(const at::Tensor& starts_BL, const at::Tensor& x) {
  if (!starts_BL.defined()) return;
  check_tensor("starts_BL", starts_BL, at::kLong, 2);
  MOESH_CHECK(starts_BL.sizes() == x.sizes().slice(0, 2), ErrorKind::internal,
              "starts of documents are ", describe(starts_BL), " for tokens ", describe(x),
              "; there is one for each token");
}

void check(const DeltaRuleInput& in, std::int64_t chunk) {
  const auto &q = in.q_BLgd, &k = in.k_BLgd, &v = in.v_BLhv;
  MOESH_CHECK(q.dim() == 4 && k.sizes() == q.sizes() && v.dim() == 4 &&
                  v.sizes().slice(0, 2) == q.sizes().slice(0, 2) && q.size(2) > 0 &&
                  v.size(2) % q.size(2) == 0,
              ErrorKind::internal, "delta rule: q ", describe(q), ", k ", describe(k), ", v ",
              describe(v), "; each is [batch, tokens, heads, width], with as many heads of v, or a",
              " multiple of them");
  for (const at::Tensor* t : {&in.decay_BLh, &in.beta_BLh}) {
    check_tensor("decay or beta", *t, wide(v), 3);
    MOESH_CHECK(t->sizes() == v.sizes().slice(0, 3), ErrorKind::internal,
                "delta rule: decay or beta is ", describe(*t), " for values ", describe(v));
  }
  MOESH_CHECK(
      !in.state_Bhdv.defined() ||
          in.state_Bhdv.sizes() == at::IntArrayRef({v.size(0), v.size(2), q.size(3), v.size(3)}),
      ErrorKind::internal, "delta rule: the state is ", describe(in.state_Bhdv), " for q ",
      describe(q), " and v ", describe(v));
  MOESH_CHECK(chunk >= 1 && q.size(1) >= 1, ErrorKind::internal, "delta rule: chunks of ", chunk,
              " tokens, of ", q.size(1), "; both are 1 or more");
  check_starts(in.starts_BL, v);
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

DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& input, std::int64_t chunk) {
  check(input, chunk);
  const at::NoGradGuard no_grad;
  return kernels_for(input.v_BLhv.device()).delta_rule_forward(input, chunk);
}

DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& input, const at::Tensor& dy_BLhv,
                                       std::int64_t chunk) {
  check(input, chunk);
  MOESH_CHECK(dy_BLhv.sizes() == input.v_BLhv.sizes(), ErrorKind::internal, "delta rule: dy is ",
              describe(dy_BLhv), " for values ", describe(input.v_BLhv));
  const at::NoGradGuard no_grad;
  return kernels_for(input.v_BLhv.device()).delta_rule_backward(input, dy_BLhv, chunk);
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
