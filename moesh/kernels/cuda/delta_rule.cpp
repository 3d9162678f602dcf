// The torch side of the kernels of Gated DeltaNet (around.h). What they do not take goes to
// LibTorch's ops.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/on_device.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::hopper {
namespace {

bool takes(const DeltaRuleInput& rule) {
  return takes_heads(rule.qkv_BLgc) && rule.key_dim == 128 && rule.value_dim() == 128;
}

/// The input as the kernels have it, and what they need besides.
struct RuleCall {
  at::Tensor decay, beta, starts, workspace;
  cuda::DeltaRule rule;

  RuleCall(const DeltaRuleInput& r, bool backward)
      : decay(r.decay_BLh.contiguous()), beta(r.beta_BLh.contiguous()), starts(plain(r.starts_BL)) {
    const auto& x = r.qkv_BLgc;
    rule = {.batch = x.size(0),
            .length = x.size(1),
            .num_key_heads = x.size(2),
            .num_value_heads = decay.size(2),
            .strides = {x.stride(0), x.stride(1), x.stride(2)},
            .decay = read_floats(decay),
            .beta = read_floats(beta),
            .starts = read_longs(starts)};
    workspace = at::empty({delta_rule_workspace(rule, backward)}, x.options().dtype(at::kByte));
  }
};

DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& r, std::int64_t chunk) {
  if (!takes(r)) return aten_kernels().delta_rule_forward(r, chunk);
  const RuleCall call(r, /*backward=*/false);
  const at::Tensor first =
      r.state_Bhdv.defined() ? r.state_Bhdv.to(at::kFloat).contiguous() : r.state_Bhdv;
  DeltaRuleOutput y{at::empty(r.y_sizes(), r.qkv_BLgc.options()),
                    at::empty(r.state_sizes(), call.decay.options())};
  OnDeviceOf{y.y_BLhv}("delta_rule", cuda::delta_rule, call.rule, in(r.qkv_BLgc),
                       read_floats(first), out(call.workspace), out(y.y_BLhv),
                       floats(y.state_Bhdv));
  return y;
}

DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& r, const at::Tensor& dy_BLhv,
                                       std::int64_t chunk) {
  if (!takes(r) || r.state_Bhdv.defined())
    return aten_kernels().delta_rule_backward(r, dy_BLhv, chunk);
  const RuleCall call(r, /*backward=*/true);
  const at::Tensor& x = r.qkv_BLgc;
  const at::Tensor dy = aligned(dy_BLhv.contiguous());
  DeltaRuleGradients d{at::empty_strided(x.sizes(), x.strides(), x.options()), fresh(call.decay),
                       fresh(call.decay)};
  OnDeviceOf{x}("delta_rule_backward", cuda::delta_rule_backward, call.rule, in(x), in(dy),
                out(call.workspace), out(d.qkv_BLgc), floats(d.decay_BLh), floats(d.beta_BLh));
  return d;
}

bool takes_convolution(const at::Tensor& x, const at::Tensor& w) {
  return takes_heads(x) && w.size(2) == 4 && w.scalar_type() == at::kFloat;
}

cuda::Convolution convolution_of(const at::Tensor& x, const at::Tensor& w,
                                 const at::Tensor& starts) {
  return {.batch = x.size(0),
          .length = x.size(1),
          .num_heads = x.size(2),
          .width = x.size(3),
          .strides = {x.stride(0), x.stride(1), x.stride(2)},
          .w = read_floats(w),
          .starts = read_longs(starts)};
}

at::Tensor convolution_forward(const at::Tensor& x, const at::Tensor& w,
                               const at::Tensor& starts_BL) {
  if (!takes_convolution(x, w)) return aten_kernels().convolution_forward(x, w, starts_BL);
  const at::Tensor taps = aligned(w.contiguous()), y = fresh(x);
  OnDeviceOf{x}("convolution", cuda::convolution, convolution_of(x, taps, starts_BL), in(x),
                out(y));
  return y;
}

ConvolutionGradients convolution_backward(const at::Tensor& x, const at::Tensor& w,
                                          const at::Tensor& starts_BL, const at::Tensor& dy) {
  if (!takes_convolution(x, w)) return aten_kernels().convolution_backward(x, w, starts_BL, dy);
  const at::Tensor taps = aligned(w.contiguous()), dy_rows = aligned(dy.contiguous());
  const cuda::Convolution convolution = convolution_of(x, taps, starts_BL);
  const at::Tensor dx = fresh(x),
                   terms = at::empty({convolution_terms(convolution), w.size(0), w.size(1), 4},
                                     w.options());
  OnDeviceOf{x}("convolution_backward", cuda::convolution_backward, convolution, in(x), in(dy_rows),
                floats(terms), out(dx));
  return {dx, terms.sum(0)};
}

}  // namespace

void add_delta_rule(KernelTable& t) {
  t.delta_rule_forward = delta_rule_forward;
  t.delta_rule_backward = delta_rule_backward;
  t.convolution_forward = convolution_forward;
  t.convolution_backward = convolution_backward;
}

}  // namespace moesh::kernels::hopper
