#include "moesh/nn/attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/nn/attention_functions.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {
namespace {

// Positions count from the first key: chunks begin where they did.
kernels::AttentionConfig kernel_config(const Tokens& tokens, const AttentionOptions& o,
                                       const PositionRange& seen) {
  // A chunk of the whole sequence means no chunks. (For other documents than whole sequences the
  // kernels cannot tell: they know only the keys of this rank.)
  const auto chunk = tokens.has_documents() && o.chunk >= tokens.sequence() ? 0 : o.chunk;
  return {.scale = o.scale,
          .start = tokens.first_position() - seen.begin,
          .window = o.window,
          .chunk = chunk,
          .most_documents = tokens.most_documents()};
}

PositionRange seen_here(const Tokens& tokens, const AttentionOptions& o) {
  return seen_ranges(tokens, o)[static_cast<size_t>(current_mesh().coordinate(cp))];
}

// Undefined without documents.
at::Tensor from_first_key(const at::Tensor& starts_BL, const PositionRange& seen) {
  return starts_BL.defined() ? starts_BL - seen.begin : starts_BL;
}

// `sinks_h` and `starts_BL` may be undefined.
at::Tensor attend_plain(const at::Tensor& q_BLhd, const at::Tensor& k_BSgd,
                        const at::Tensor& v_BSgd, const at::Tensor& sinks_h,
                        const at::Tensor& starts_BL, const Tokens& tokens,
                        const AttentionOptions& o, const KvCache* kv_cache) {
  const PositionRange seen = kv_cache ? kv_cache->kept() : seen_here(tokens, o);
  MOESH_CHECK(k_BSgd.size(1) == seen.end - seen.begin && v_BSgd.size(1) == k_BSgd.size(1),
              "attention: ", k_BSgd.size(1), " keys and ", v_BSgd.size(1),
              " values, and the queries of this cp rank see ", seen.end - seen.begin,
              " positions; take both from seen_positions with the same options");
  const kernels::AttentionConfig config = kernel_config(tokens, o, seen);
  const kernels::AttentionInput input{q_BLhd, k_BSgd, v_BSgd, sinks_h,
                                      from_first_key(starts_BL, seen)};
  return kernels::takes_attention(config, input) ? fused_attention(config, input)
                                                 : composed_attention(config, input);
}

// [h]: the largest of all queries, in blocks of them. r query heads of a key head, l queries of a
// block, s keys up to its last
at::Tensor largest_logits(const kernels::AttentionConfig& c, const at::Tensor& q_BLhd,
                          const at::Tensor& k_BSgd, const at::Tensor& starts_BL,
                          std::int64_t most_scores) {
  const auto wide = wide_dtype(q_BLhd.scalar_type());
  const auto batch = q_BLhd.size(0), length = q_BLhd.size(1), num_heads = q_BLhd.size(2),
             num_keys = k_BSgd.size(1), groups = k_BSgd.size(2);
  at::Tensor largest_h = at::full({num_heads}, -INFINITY, q_BLhd.options().dtype(wide));
  if (q_BLhd.numel() == 0) return largest_h;
  const auto rows = std::max<std::int64_t>(1, most_scores / (batch * num_heads * num_keys));
  const at::Tensor k_BgdS = k_BSgd.to(wide).permute({0, 2, 3, 1});
  kernels::AttentionConfig of_block = c;
  for (std::int64_t first = 0; first < length; first += rows) {
    const auto count = std::min(rows, length - first);
    of_block.start = c.start + first;
    const auto end = std::min(num_keys, of_block.start + count);
    const at::Tensor q_BgMd = q_BLhd.narrow(1, first, count)
                                  .to(wide)
                                  .unflatten(2, {groups, num_heads / groups})
                                  .permute({0, 2, 3, 1, 4})
                                  .flatten(2, 3);  // M: r times l
    const at::Tensor scores_Bhls = q_BgMd.matmul(k_BgdS.narrow(3, 0, end))
                                       .mul_(c.scale)
                                       .unflatten(2, {num_heads / groups, count})
                                       .flatten(1, 2);
    const at::Tensor starts = starts_BL.defined() ? starts_BL.narrow(1, first, count) : starts_BL;
    const at::Tensor hidden =
        visible_keys(count, end, of_block, starts, q_BLhd.device()).logical_not();
    largest_h = at::maximum(largest_h, scores_Bhls.masked_fill(hidden, -INFINITY).amax({0, 2, 3}));
  }
  return largest_h;
}

}  // namespace

void MaxLogits::see(const Heads& q, const Heads& k, const Tokens& tokens, const AttentionOptions& o,
                    std::int64_t most_scores) {
  const at::NoGradGuard no_grad;
  const PositionRange seen = seen_here(tokens, o);
  const at::Tensor starts_BL = from_first_key(local(tokens.document_starts()), seen);
  const at::Tensor mine =
      largest_logits(kernel_config(tokens, o, seen), local(q), local(k), starts_BL, most_scores);
  if (!largest_h_.defined()) largest_h_ = at::full_like(mine, -INFINITY);
  largest_h_.copy_(at::maximum(largest_h_, mine));
}

Heads split_heads(const Tensor<Dense{Place::T, Place::T, Place::F}>& x, std::int64_t width) {
  return unflatten(x, -1, {local(x).size(-1) / width, width});
}

Tensor<Dense{Place::T, Place::T, Place::F}> merge_heads(const Heads& x) { return flatten(x, 2, 3); }

std::vector<PositionRange> seen_ranges(const Tokens& tokens, const AttentionOptions& o) {
  const std::int64_t all = tokens.sequence();
  const bool sees_all = (o.window == 0 || o.window >= all) && (o.chunk == 0 || o.chunk >= all);
  std::vector<PositionRange> found;
  std::int64_t start = 0;
  for (auto length : tokens.over_cp().sizes) {
    std::int64_t first = o.window > 0 ? std::max<std::int64_t>(0, start - o.window + 1) : 0;
    if (o.chunk > 0 && tokens.has_documents())
      first = std::max(first, start - o.chunk + 1);
    else if (o.chunk > 0)
      first = std::max(first, start / o.chunk * o.chunk) / o.chunk * o.chunk;
    if (length == 0) first = start;
    found.push_back(sees_all ? PositionRange{0, all} : PositionRange{first, start + length});
    start += length;
  }
  return found;
}

at::Tensor seen_numbers(const Tokens& tokens, const AttentionOptions& options) {
  const PositionRange seen =
      seen_ranges(tokens, options)[static_cast<size_t>(current_mesh().coordinate(cp))];
  return tokens.numbers(seen.begin, seen.end);
}

Heads seen_positions(const Heads& x, const Tokens& tokens, const AttentionOptions& o) {
  return gather_ranges<cp>(x, tokens.over_cp(), seen_ranges(tokens, o));
}
Full seen_positions(const Full& x, const Tokens& tokens, const AttentionOptions& o) {
  return gather_ranges<cp>(x, tokens.over_cp(), seen_ranges(tokens, o));
}

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

RopeTable rope_of(RopeTables& tables, const RopeConfig& config, const Tokens& tokens,
                  const Full& x) {
  const auto dtype = local(x).scalar_type();
  const auto device = local(x).device();
  if (!tokens.has_documents())
    return tables.at(config, tokens.first_position(), tokens.span_length(), dtype, device);
  RopeTable table = tables.at(config, 0, tokens.sequence(), dtype, device);
  table.positions_BL = local(tokens.document_positions());
  return table;
}

Heads attend(const Heads& q, const Heads& k, const Heads& v, const Tokens& tokens,
             const AttentionOptions& options, const KvCache* kv_cache) {
  return map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd,
          const at::Tensor& starts_BL) {
        return attend_plain(q_BLhd, k_BSgd, v_BSgd, {}, starts_BL, tokens, options, kv_cache);
      },
      q, k, v, tokens.document_starts());
}

Heads attend(const Heads& q, const Heads& k, const Heads& v, const PerHead& sinks,
             const Tokens& tokens, const AttentionOptions& options, const KvCache* kv_cache) {
  return map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSgd, const at::Tensor& v_BSgd,
          const at::Tensor& sinks_h, const at::Tensor& starts_BL) {
        return attend_plain(q_BLhd, k_BSgd, v_BSgd, sinks_h, starts_BL, tokens, options, kv_cache);
      },
      q, k, v, sinks, tokens.document_starts());
}

Heads attend(const Heads& q, const Full& k, const Full& v, const Tokens& tokens,
             const AttentionOptions& options, const KvCache& kv_cache) {
  return map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSd, const at::Tensor& v_BSd) {
        return attend_plain(q_BLhd, k_BSd.unsqueeze(2), v_BSd.unsqueeze(2), {}, {}, tokens, options,
                            &kv_cache);
      },
      q, k, v);
}

}  // namespace moesh::nn
