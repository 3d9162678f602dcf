#include "moesh/nn/attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/spmd/all_gather.h"

namespace moesh::nn {
namespace {

// [L, S]: which keys each of the queries [start, start + L) sees.
at::Tensor visible_keys(std::int64_t start, std::int64_t length, std::int64_t all, const AttentionOptions& o, at::Device device) {
  const auto index = at::TensorOptions(device).dtype(at::kLong);
  const at::Tensor query = at::arange(start, start + length, index).unsqueeze(1), key = at::arange(all, index);
  at::Tensor visible = key <= query;
  if (o.window > 0) visible = visible.logical_and(key > query - o.window);
  if (o.chunk > 0) visible = visible.logical_and(key.div(o.chunk, "floor") == query.div(o.chunk, "floor"));
  return visible;
}

// `sinks` [h], or undefined.
at::Tensor attend_raw(const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd, const at::Tensor& sinks,
                      std::int64_t start, const AttentionOptions& o) {
  const auto heads = [](const at::Tensor& x) { return x.transpose(1, 2); };
  at::Tensor queries = heads(q_BLhd), keys = heads(k_BSgd), values = heads(v_BSgd);
  const auto length = queries.size(2), all = keys.size(2), num_heads = queries.size(1), groups = keys.size(1);
  MOESH_CHECK(groups == 0 || num_heads % groups == 0, ErrorKind::config, "attention: this rank has ", num_heads,
              " query heads and ", groups, " key heads; choose a tp that divides both numbers of heads");
  if (groups > 0 && groups != num_heads) {
    keys = keys.repeat_interleave(num_heads / groups, 1);
    values = values.repeat_interleave(num_heads / groups, 1);
  }
  if (sinks.defined()) {
    // A sink is one more key, which every query sees with the score of its head and whose value is zero. An extra feature does
    // it, 1 in the queries, 0 in the keys and sink / scale in this one, and the fused kernels stay as they are. Seven zeros go
    // with it: the kernels want aligned widths.
    const auto width = queries.size(3);
    queries = at::cat(
        {queries, at::ones_like(queries.narrow(3, 0, 1)), at::zeros_like(queries.narrow(3, 0, 1)).expand({-1, -1, -1, 7})}, 3);
    const at::Tensor sink = at::constant_pad_nd(sinks.reshape({1, num_heads, 1, 1}) / o.scale, {width, 7});
    keys = at::cat({at::constant_pad_nd(keys, {0, 8}), sink.expand({keys.size(0), -1, -1, -1})}, 2);
    values = at::constant_pad_nd(values, {0, 0, 0, 1});
  }
  if (queries.numel() == 0) {  // a rank without tokens or heads: an empty result that still hangs on its inputs
    return heads(queries.matmul(keys.transpose(-1, -2)).matmul(values));
  }
  const auto width = values.size(-1), key_width = keys.size(-1);
  // The fused kernels want heads of one width.
  if (width < key_width) values = at::constant_pad_nd(values, {0, key_width - width});
  const bool sees_all = (o.window == 0 || o.window >= all) && (o.chunk == 0 || o.chunk >= all);
  at::Tensor out;
  if (length == all && sees_all && !sinks.defined()) {
    out = at::scaled_dot_product_attention(queries, keys, values, {}, 0.0, /*is_causal=*/true, o.scale);
  } else {
    at::Tensor visible = visible_keys(start, length, all, o, queries.device());
    if (sinks.defined()) visible = at::cat({visible, at::ones({length, 1}, visible.options())}, 1);
    out = at::scaled_dot_product_attention(queries, keys, values, visible, 0.0, /*is_causal=*/false, o.scale);
  }
  return heads(out.narrow(-1, 0, width));
}

}  // namespace

Heads split_heads(const Tensor<Dense{Place::T, Place::T, Place::F}>& x, std::int64_t width) {
  return declare<Heads::layout>([&](const at::Tensor& t) { return t.unflatten(-1, {t.size(-1) / width, width}); }, x);
}

Tensor<Dense{Place::T, Place::T, Place::F}> merge_heads(const Heads& x) {
  return declare<Heads::layout>([](const at::Tensor& t) { return t.flatten(2); }, x);
}

AllHeads all_positions(const Heads& x, const Tokens& tokens) { return all_gather<cp>(x, tokens.over_cp()); }

double mean_visible(std::int64_t sequence, const AttentionOptions& o) {
  double sum = 0;
  for (std::int64_t i = 0; i < sequence; ++i) {
    std::int64_t seen = i + 1;
    if (o.window > 0) seen = std::min(seen, o.window);
    if (o.chunk > 0) seen = std::min(seen, i % o.chunk + 1);
    sum += static_cast<double>(seen);
  }
  return sum / static_cast<double>(std::max<std::int64_t>(1, sequence));
}

Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const Tokens& tokens, const AttentionOptions& options) {
  return declare<Heads::layout>(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd) {
        return attend_raw(q_BLhd, k_BSgd, v_BSgd, {}, tokens.block_start(), options);
      },
      q, k, v);
}

Heads attend(const Heads& q, const AllHeads& k, const AllHeads& v, const PerHead& sinks, const Tokens& tokens,
             const AttentionOptions& options) {
  return declare<Heads::layout>(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd, const at::Tensor& sinks_h) {
        return attend_raw(q_BLhd, k_BSgd, v_BSgd, sinks_h, tokens.block_start(), options);
      },
      q, k, v, sinks);
}

}  // namespace moesh::nn
