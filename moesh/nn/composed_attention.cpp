#include "moesh/nn/attention_functions.h"

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>

#include "moesh/base/error.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/spmd/attach.h"

namespace moesh::nn {
namespace {

using kernels::AttentionConfig;
using kernels::AttentionInput;

// [h, 3]: numbers of a narrow dtype whose sum is the float32 sink / scale (three times 8 bits).
at::Tensor sink_features(const at::Tensor& sinks_h, double scale, at::ScalarType dtype) {
  const at::Tensor whole = sinks_h.detach() / scale, first = whole.to(dtype);
  at::Tensor rest = whole - first;
  const at::Tensor second = rest.to(dtype);
  rest = rest - second;
  return at::stack({first, second, rest.to(dtype)}, 1);
}

// The outputs as they are, and the gradient of the sinks in their own dtype: through the features
// of a key it would be rounded to that of the keys. d(sink) is -share <d(y), y>, summed over the
// queries, where the share is what the sink takes of a query's softmax.
at::Tensor with_sink_gradient(const at::Tensor& y_BhLv, const at::Tensor& share_BhL1,
                              const at::Tensor& sinks_h) {
  return raw::differentiable({y_BhLv, sinks_h}, [&]() -> raw::Differentiable {
    const auto backward = [dtype = sinks_h.scalar_type()](const raw::Tensors& saved,
                                                          const raw::Tensors& dy) {
      const at::Tensor of_query_BhL1 = (dy[0].to(dtype) * saved[0].to(dtype)).sum(-1, true);
      return raw::Tensors{dy[0], -(of_query_BhL1 * saved[1].to(dtype)).sum({0, 2, 3})};
    };
    return {{y_BhLv.detach()}, {y_BhLv, share_BhL1}, backward};
  })[0];
}

// On meta the library would take its formula, which keeps scores [L, S]; what runs on a device is a
// fused kernel.
at::Tensor fused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const std::optional<at::Tensor>& mask, bool is_causal, double scale,
                 bool is_grouped = false) {
  if (q.is_meta())
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, mask, scale));
  return at::scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale, is_grouped);
}

// The causal kernel of cuDNN, or on meta what stands for it: y, the logarithms of the sums, and two
// numbers for dropout, which is not used.
raw::Tensors run_causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        double scale) {
  if (auto first = raw::recall("causal attention")) return *first;
  raw::Tensors results;
  if (q.is_meta()) {
    const auto [y, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, /*is_causal=*/true, {}, scale);
    results = {y, lse, {}, {}};
  } else {
    const auto out = at::_scaled_dot_product_cudnn_attention(
        q, k, v, {}, /*compute_log_sumexp=*/true, 0.0, /*is_causal=*/true,
        /*return_debug_mask=*/false, scale);
    results = {std::get<0>(out), std::get<1>(out), std::get<6>(out), std::get<7>(out)};
  }
  raw::keep("causal attention", results);
  return results;
}

raw::Tensors causal_gradients(const raw::Tensors& s, const at::Tensor& dy, double scale) {
  const at::Tensor &q = s[0], &k = s[1], &v = s[2], &y = s[3], &lse = s[4];
  if (q.is_meta()) {
    // d(k) and d(v) of every query head are there before they are summed over a group.
    raw::Tensors of_heads;
    if (q.size(1) != k.size(1))
      for (const at::Tensor& t : {k, v})
        of_heads.push_back(at::empty({q.size(0), q.size(1), t.size(2), t.size(3)}, t.options()));
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dy, q, k, v, y, lse, 0.0, /*is_causal=*/true, {}, scale);
    return {dq, dk, dv};
  }
  const at::Tensor none;
  const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
      dy, q, k, v, y, lse, s[5], s[6], none, none, none, q.size(2), k.size(2), 0.0,
      /*is_causal=*/true, scale);
  return {dq, dk, dv};
}

// As LibTorch calls it: by a function of our own, so that a recompute can keep its result.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            double scale) {
  return raw::differentiable({q, k, v}, [&]() -> raw::Differentiable {
    const raw::Tensors made = run_causal(q, k, v, scale);
    return {{made[0]},
            {q, k, v, made[0], made[1], made[2], made[3]},
            [scale](const auto& saved, const auto& dy) {
              return causal_gradients(saved, dy[0], scale);
            }};
  })[0];
}

// The fused kernel that takes values of another width than keys, and fewer key heads than query
// heads, as they are: cuDNN's does in bfloat16 on Hopper, twice as fast as what takes them padded
// and repeated. (The memory-efficient kernel takes other widths, too, but is slower.)
at::SDPBackend kernel_for(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, bool is_grouped) {
  if (q.is_meta()) return at::SDPBackend::cudnn_attention;
  return static_cast<at::SDPBackend>(
      at::_fused_sdp_choice(q, k, v, {}, 0.0, /*is_causal=*/true, scale, is_grouped));
}

}  // namespace

at::Tensor visible_keys(std::int64_t length, std::int64_t all, const AttentionConfig& c,
                        const at::Tensor& starts_BL, at::Device device) {
  const auto index = at::TensorOptions(device).dtype(at::kLong);
  const at::Tensor query = at::arange(c.start, c.start + length, index).unsqueeze(1),
                   key = at::arange(all, index);
  at::Tensor visible = key <= query, into_document = query;
  if (starts_BL.defined()) {
    const at::Tensor starts = starts_BL.unsqueeze(1).unsqueeze(3);  // [B, 1, L, 1]
    visible = visible.logical_and(key >= starts);
    into_document = query - starts;
  }
  if (c.window > 0) visible = visible.logical_and(key > query - c.window);
  if (c.chunk > 0) visible = visible.logical_and(key >= query - into_document.remainder(c.chunk));
  return visible;
}

at::Tensor composed_attention(const AttentionConfig& c, const AttentionInput& in) {
  if (takes_flash_attention(c, in)) return flash_attention(c, in);
  const auto heads = [](const at::Tensor& x) { return x.transpose(1, 2); };
  at::Tensor queries = heads(in.q_BLhd), keys = heads(in.k_BSgd), values = heads(in.v_BSgv);
  const auto length = queries.size(2), all = keys.size(2), num_heads = queries.size(1),
             groups = keys.size(1), value_width = values.size(3);
  MOESH_CHECK(groups == 0 ? num_heads == 0 : num_heads % groups == 0, ErrorKind::config,
              "attention: this rank has ", num_heads, " query heads and ", groups,
              " key heads; choose a tp that divides both numbers of heads");
  const bool is_grouped = groups != num_heads;
  const bool sees_all = (c.window == 0 || c.window >= all) && (c.chunk == 0 || c.chunk >= all);
  const bool is_causal =
      length == all && sees_all && !in.sinks_h.defined() && !in.starts_BL.defined();
  const bool is_empty = queries.numel() == 0;
  if (is_causal && !is_empty) {
    const auto kernel = kernel_for(queries, keys, values, c.scale, is_grouped);
    if (kernel == at::SDPBackend::cudnn_attention)
      return heads(causal_attention(queries, keys, values, c.scale));
    if (kernel == at::SDPBackend::flash_attention)
      return heads(fused(queries, keys, values, {}, /*is_causal=*/true, c.scale, is_grouped));
  }
  if (is_grouped) {
    keys = keys.repeat_interleave(num_heads / groups, 1);
    values = values.repeat_interleave(num_heads / groups, 1);
  }
  if (in.sinks_h.defined()) {
    // A sink is one more key, which every query sees with the score of its head and whose value is
    // zero. Extra features do it, 1 in the queries, 0 in the keys and sink / scale in this one, and
    // the fused kernels stay as they are: they sum a score in float32, so that three features of
    // bfloat16 hold a sink of float32. Five zeros go with them: the kernels want aligned widths.
    // One more column of the values, 1 in this key and 0 in the others, gives what it takes of each
    // softmax.
    const auto width = queries.size(3);
    const at::Tensor ones =
        at::ones({1, 1, 1, 3}, queries.options()).expand({queries.size(0), num_heads, length, 3});
    queries = at::constant_pad_nd(at::cat({queries, ones}, 3), {0, 5});
    const at::Tensor sink =
        at::constant_pad_nd(sink_features(in.sinks_h, c.scale, keys.scalar_type()), {width, 5})
            .reshape({1, num_heads, 1, width + 8});
    keys = at::cat({at::constant_pad_nd(keys, {0, 8}), sink.expand({keys.size(0), -1, -1, -1})}, 2);
    const at::Tensor value =
        at::constant_pad_nd(at::ones({1, 1, 1, 1}, values.options()), {value_width, 0});
    values = at::cat(
        {at::constant_pad_nd(values, {0, 1}), value.expand({values.size(0), num_heads, 1, -1})}, 2);
  }
  // The fused kernels want heads of one width.
  if (values.size(3) < keys.size(3))
    values = at::constant_pad_nd(values, {0, keys.size(3) - values.size(3)});
  at::Tensor out;
  if (is_empty) {
    // A rank without tokens or heads: an empty result that still depends on its inputs.
    out = queries.matmul(keys.transpose(-1, -2)).matmul(values);
  } else if (is_causal) {
    out = fused(queries, keys, values, {}, /*is_causal=*/true, c.scale);
  } else {
    at::Tensor visible = visible_keys(length, all, c, in.starts_BL, queries.device());
    if (in.sinks_h.defined()) visible = at::constant_pad_nd(visible, {0, 1}, true);
    out = fused(queries, keys, values, visible, /*is_causal=*/false, c.scale);
  }
  at::Tensor y = out.narrow(-1, 0, value_width);
  if (in.sinks_h.defined())
    y = with_sink_gradient(y, out.narrow(-1, value_width, 1).detach(), in.sinks_h);
  return heads(y);
}

}  // namespace moesh::nn
