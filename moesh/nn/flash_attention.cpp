// A sink is one more score without a value. With lse the logarithm of the sum of exponentials,
// lse' = log(exp(lse) + exp(sink)) and y' = y exp(lse - lse'). Backward of the kernel without a
// sink wants y and lse only for the probabilities p = exp(score - lse) and for D = <dy, y> in
// d(score) = p (<dy, v> - D): given y' and lse' it computes what belongs to the sink's softmax, and
// d(sink) = -exp(sink - lse') D.
// B batch, L queries, S keys, h query heads, g key heads, d width

#include "moesh/nn/flash_attention.h"

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>

#include "moesh/spmd/recompute.h"

namespace moesh::nn {
namespace {

using kernels::AttentionConfig;
using kernels::AttentionInput;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Keys before a query that it sees; nothing: all.
std::optional<std::int64_t> reach_of(std::int64_t window) {
  return window > 0 ? std::optional(window - 1) : std::nullopt;
}

struct Result {
  at::Tensor y_BLhd, lse_BhL;
};

Result run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
           std::int64_t window) {
  if (q.is_meta())
    return {at::empty(q.sizes(), q.options()),
            at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))};
  const auto out = at::_flash_attention_forward(q, k, v, {}, {}, q.size(1), k.size(1),
                                                /*dropout_p=*/0, /*is_causal=*/true,
                                                /*return_debug_mask=*/false, scale,
                                                reach_of(window), /*window_size_right=*/0);
  return {std::get<0>(out), std::get<1>(out)};
}

Result run_with_sinks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const at::Tensor& sinks, double scale, std::int64_t window) {
  Result r = run(q, k, v, scale, window);
  if (!sinks.defined()) return r;
  const at::Tensor lse_BhL = at::logaddexp(r.lse_BhL, sinks.reshape({1, -1, 1}));
  const at::Tensor share_BLh = (r.lse_BhL - lse_BhL).exp_().transpose(1, 2);
  at::mul_out(r.y_BLhd, r.y_BLhd, share_BLh.unsqueeze(3));
  return {r.y_BLhd, lse_BhL};
}

Result kept_or_run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& sinks, double scale, std::int64_t window) {
  if (const auto first = raw::recall("attention with a window or sinks"))
    return {(*first)[0], (*first)[1]};
  Result r = run_with_sinks(q, k, v, sinks, scale, window);
  raw::keep("attention with a window or sinks", {r.y_BLhd, r.lse_BhL});
  return r;
}

class FlashAttention : public torch::autograd::Function<FlashAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>& sinks_h,
                            double scale, std::int64_t window) {
    const at::Tensor sinks = sinks_h.value_or(at::Tensor());
    const Result r = kept_or_run(q, k, v, sinks, scale, window);
    context->save_for_backward({q, k, v, sinks, r.y_BLhd, r.lse_BhL});
    context->saved_data["scale"] = scale;
    context->saved_data["window"] = window;
    return r.y_BLhd;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &sinks = saved[3], &y = saved[4],
                     &lse_BhL = saved[5];
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor d_sinks;
    if (sinks.defined()) {
      const at::Tensor dot_BhL = dy.to(at::kFloat).mul_(y).sum(at::IntArrayRef{3}).transpose(1, 2);
      const at::Tensor share_BhL = (sinks.reshape({1, -1, 1}) - lse_BhL).exp_();
      d_sinks = share_BhL.mul_(dot_BhL).sum(at::IntArrayRef{0, 2}).neg_();
    }
    if (q.is_meta()) {
      // The kernel sums d(q) in float32, and has d(k) and d(v) of every query head before it sums
      // them over a group.
      const at::Tensor sums = at::empty(q.sizes(), q.options().dtype(at::kFloat));
      const std::int64_t of_heads[] = {k.size(0), k.size(1), q.size(2), k.size(3)};
      const at::Tensor dk = at::empty(of_heads, k.options()), dv = at::empty(of_heads, v.options());
      return {at::empty(q.sizes(), q.options()),
              at::empty(k.sizes(), k.options()),
              at::empty(v.sizes(), v.options()),
              d_sinks,
              {},
              {}};
    }
    const at::Tensor unused = at::empty({2}, q.options().dtype(at::kLong));  // seeds of dropout
    auto [dq, dk, dv] = at::_flash_attention_backward(
        dy, q, k, v, y, lse_BhL, {}, {}, q.size(1), k.size(1), /*dropout_p=*/0, /*is_causal=*/true,
        unused, unused, context->saved_data["scale"].toDouble(),
        reach_of(context->saved_data["window"].toInt()), /*window_size_right=*/0);
    return {dq, dk, dv, d_sinks, {}, {}};
  }
};

// The kernel wants compute capability 8.0, and so does everything that LibTorch would choose for
// these tensors but for its slow ways. (Asked without a mask, and not as causal: it is not known
// there that queries may be the last positions of the keys.)
bool has_fast_kernels(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (q.is_meta()) return true;
  const auto kernel = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
      q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, /*is_causal=*/false,
      std::nullopt, /*enable_gqa=*/q.size(2) != k.size(2)));
  return kernel == at::SDPBackend::cudnn_attention || kernel == at::SDPBackend::flash_attention;
}

}  // namespace

bool takes_flash_attention(const AttentionConfig& c, const AttentionInput& in) {
  const auto &q = in.q_BLhd, &k = in.k_BSgd, &v = in.v_BSgv;
  const auto all = k.size(1), width = q.size(3);
  const bool has_window = c.window > 0 && c.window < all;
  return (q.is_cuda() || q.is_meta()) && q.scalar_type() == at::kBFloat16 && q.numel() > 0 &&
         (has_window || in.sinks_h.defined()) && (c.chunk == 0 || c.chunk >= all) &&
         c.start + q.size(1) == all && width == v.size(3) && width % 8 == 0 && width <= 256 &&
         has_fast_kernels(q, k, v);
}

at::Tensor flash_attention(const AttentionConfig& c, const AttentionInput& in) {
  const auto rows = [](const at::Tensor& t) { return t.stride(3) == 1 ? t : t.contiguous(); };
  const std::optional<at::Tensor> sinks =
      in.sinks_h.defined() ? std::optional(in.sinks_h) : std::nullopt;
  return FlashAttention::apply(rows(in.q_BLhd), rows(in.k_BSgd), rows(in.v_BSgv), sinks, c.scale,
                               c.window < in.k_BSgd.size(1) ? c.window : 0);
}

}  // namespace moesh::nn
