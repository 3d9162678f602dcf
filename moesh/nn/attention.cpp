#include "moesh/nn/attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/einsum.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/nn/attention_functions.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

at::Tensor fused_attention(const kernels::AttentionConfig& config,
                           const kernels::AttentionInput& in) {
  const auto forward = [&]() -> kernels::AttentionOutput {
    if (const auto first = raw::recall("attention")) return {(*first)[0], (*first)[1]};
    auto out = kernels::attention_forward(config, in);
    raw::keep("attention", {out.y_BLhv, out.lse_BhL});
    return out;
  };
  return raw::differentiable(
      {in.q_BLhd, in.k_BSgd, in.v_BSgv, in.sinks_h}, [&]() -> raw::Differentiable {
        const auto out = forward();
        return {
            {out.y_BLhv},
            {in.q_BLhd, in.k_BSgd, in.v_BSgv, in.sinks_h, in.starts_BL, out.y_BLhv, out.lse_BhL},
            [config](const auto& s, const auto& dy) {
              const auto d = kernels::attention_backward(config, {s[0], s[1], s[2], s[3], s[4]},
                                                         {s[5], s[6]}, dy[0]);
              return raw::Tensors{d.q_BLhd, d.k_BSgd, d.v_BSgv, d.sinks_h};
            }};
      })[0];
}

namespace {

bool sees_all(const AttentionOptions& o, std::int64_t sequence) {
  return (o.window == 0 || o.window >= sequence) && (o.chunk == 0 || o.chunk >= sequence);
}

// The keys that queries at these positions may see.
PositionRange keys_of(const PositionRange& queries, const Tokens& tokens,
                      const AttentionOptions& o) {
  const std::int64_t start = queries.begin;
  if (queries.length() == 0) return {start, start};
  std::int64_t first = o.window > 0 ? std::max<std::int64_t>(0, start - o.window + 1) : 0;
  if (o.chunk > 0 && tokens.has_documents())
    first = std::max<std::int64_t>(first, start - o.chunk + 1);
  else if (o.chunk > 0)
    first = std::max(first, start / o.chunk * o.chunk) / o.chunk * o.chunk;
  return {first, queries.end};
}

PositionRanges seen_here(const Tokens& tokens, const AttentionOptions& o) {
  return seen_ranges(tokens, o)[static_cast<size_t>(current_mesh().coordinate(cp))];
}

// One range of this rank's queries, and the keys that they may see: the work of a kernel.
struct KernelCall {
  PositionRange queries, keys;
  std::int64_t first_query, first_key;  // their rows among those of this rank

  // Positions count from the first key: chunks begin where they did.
  kernels::AttentionConfig config(const Tokens& tokens, const AttentionOptions& o) const {
    // A chunk of the whole sequence means no chunks. (For other documents than whole sequences the
    // kernels cannot tell: they know only the keys of this rank.)
    const auto chunk = tokens.has_documents() && o.chunk >= tokens.sequence() ? 0 : o.chunk;
    return {.scale = o.scale,
            .start = queries.begin - keys.begin,
            .window = o.window,
            .chunk = chunk,
            .most_documents = tokens.most_documents()};
  }
  // Undefined without documents.
  at::Tensor starts(const at::Tensor& starts_BL) const {
    if (!starts_BL.defined()) return starts_BL;
    return (starts_BL.narrow(1, first_query, queries.length()) - keys.begin).contiguous();
  }
};

// `has`: the positions of the keys that are there.
std::vector<KernelCall> kernel_calls(const Tokens& tokens, const AttentionOptions& o,
                                     const PositionRanges& has) {
  std::vector<KernelCall> calls;
  std::int64_t first_query = 0;
  for (const PositionRange& queries : tokens.positions()) {
    KernelCall call{queries, keys_of(queries, tokens, o), first_query, 0};
    for (const PositionRange& r : has) {
      if (call.keys.begin < r.end) {
        call.keys.begin = std::max(call.keys.begin, r.begin);
        call.first_key += call.keys.begin - r.begin;
        break;
      }
      call.first_key += r.length();
    }
    calls.push_back(call);
    first_query += queries.length();
  }
  return calls;
}

// The keys or values [B, S, ..] of each call. Calls share rows: their gradients are added up in
// one tensor, where each slice of autograd would have one of the size of x.
std::vector<at::Tensor> parts_of_calls(const at::Tensor& x, const std::vector<KernelCall>& calls) {
  const auto part = [](const at::Tensor& t, const KernelCall& c) {
    return t.narrow(1, c.first_key, c.keys.length());
  };
  if (calls.size() == 1) return {calls[0].keys.length() == x.size(1) ? x : part(x, calls[0])};
  std::vector<at::Tensor> parts;
  for (const KernelCall& c : calls) parts.push_back(part(x.detach(), c));
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return parts;
  return raw::attach_many(
      {x}, parts,
      [part, calls, like = at::empty({0}, x.options()),
       sizes = x.sizes().vec()](const std::vector<at::Tensor>& grads) -> std::vector<at::Tensor> {
        at::Tensor sum = at::zeros(sizes, like.options());
        for (size_t i = 0; i < calls.size(); ++i) part(sum, calls[i]).add_(grads[i]);
        return {sum};
      });
}

// `sinks_h` and `starts_BL` may be undefined.
at::Tensor attend_plain(const at::Tensor& q_BLhd, const at::Tensor& k_BSgd,
                        const at::Tensor& v_BSgd, const at::Tensor& sinks_h,
                        const at::Tensor& starts_BL, const Tokens& tokens,
                        const AttentionOptions& o, const KvCache* kv_cache) {
  const PositionRanges seen = kv_cache ? PositionRanges{kv_cache->kept()} : seen_here(tokens, o);
  MOESH_CHECK(k_BSgd.size(1) == total_length(seen) && v_BSgd.size(1) == k_BSgd.size(1),
              "attention: ", k_BSgd.size(1), " keys and ", v_BSgd.size(1),
              " values, and the queries of this cp rank see ", total_length(seen),
              " positions; take both from start_seen_positions with the same options");
  const auto calls = kernel_calls(tokens, o, seen);
  const auto keys = parts_of_calls(k_BSgd, calls), values = parts_of_calls(v_BSgd, calls);
  std::vector<std::int64_t> lengths;
  for (const KernelCall& c : calls) lengths.push_back(c.queries.length());
  const std::vector<at::Tensor> queries =
      calls.size() == 1 ? std::vector{q_BLhd} : q_BLhd.split_with_sizes(lengths, 1);
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < calls.size(); ++i) {
    const kernels::AttentionConfig config = calls[i].config(tokens, o);
    const kernels::AttentionInput input{queries[i], keys[i], values[i], sinks_h,
                                        calls[i].starts(starts_BL)};
    outputs.push_back(kernels::takes_attention(config, input) ? fused_attention(config, input)
                                                              : composed_attention(config, input));
  }
  return outputs.size() == 1 ? outputs[0] : at::cat(outputs, 1);
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
  const at::Tensor& starts_BL = local(tokens.document_starts());
  for (const KernelCall& c : kernel_calls(tokens, o, seen_here(tokens, o))) {
    const at::Tensor of_call = largest_logits(
        c.config(tokens, o), local(q).narrow(1, c.first_query, c.queries.length()),
        local(k).narrow(1, c.first_key, c.keys.length()), c.starts(starts_BL), most_scores);
    if (!largest_h_.defined()) largest_h_ = at::full_like(of_call, -INFINITY);
    largest_h_.copy_(at::maximum(largest_h_, of_call));
  }
}

Heads split_heads(const Tensor<Dense{Place::T, Place::T, Place::F}>& x, std::int64_t width) {
  return unflatten(x, -1, {local(x).size(-1) / width, width});
}

Tensor<Dense{Place::T, Place::T, Place::F}> merge_heads(const Heads& x) { return flatten(x, 2, 3); }

std::vector<PositionRanges> seen_ranges(const Tokens& tokens, const AttentionOptions& o) {
  const auto spans = tokens.spans();
  if (sees_all(o, tokens.sequence()))
    return std::vector<PositionRanges>(spans.size(), {{0, tokens.sequence()}});
  std::vector<PositionRanges> found;
  for (const PositionRanges& span : spans) {
    PositionRanges& seen = found.emplace_back();
    for (const PositionRange& queries : span) {
      const PositionRange keys = keys_of(queries, tokens, o);
      if (keys.length() == 0) continue;
      if (!seen.empty() && keys.begin <= seen.back().end)
        seen.back().end = keys.end;
      else
        seen.push_back(keys);
    }
  }
  return found;
}

at::Tensor seen_numbers(const Tokens& tokens, const AttentionOptions& options) {
  return tokens.numbers(seen_here(tokens, options));
}

double num_visible(const PositionRange& queries, const AttentionOptions& o) {
  // Pairs of the first n queries of a chunk.
  const auto of_chunk = [&](std::int64_t n) {
    const std::int64_t rising = o.window > 0 ? std::min(n, o.window) : n;
    return static_cast<double>(rising) * static_cast<double>(rising + 1) / 2 +
           static_cast<double>(n - rising) * static_cast<double>(o.window);
  };
  const auto of_first = [&](std::int64_t n) {
    if (o.chunk == 0) return of_chunk(n);
    return static_cast<double>(n / o.chunk) * of_chunk(o.chunk) + of_chunk(n % o.chunk);
  };
  return of_first(queries.end) - of_first(queries.begin);
}

double mean_visible(std::int64_t sequence, const AttentionOptions& o) {
  return num_visible({0, sequence}, o) / static_cast<double>(std::max<std::int64_t>(1, sequence));
}

double longest_share(const AttentionOptions& o, std::int64_t sequence, int num_cp,
                     SequenceCut cut) {
  double most = 0;
  for (int c = 0; c < num_cp; ++c) {
    double sum = 0;
    for (const PositionRange& r : SequenceShard(1, sequence, num_cp, c, 1, cut).ranges())
      sum += num_visible(r, o);
    most = std::max(most, sum);
  }
  const double all = num_visible({0, sequence}, o);
  return all > 0 ? most * num_cp / all : 1;
}

SequenceCut cheaper_cut(const std::vector<std::optional<AttentionOptions>>& layers,
                        std::int64_t sequence, int num_cp) {
  // Ranks wait for each other in every layer: each counts as its own longest rank does.
  const auto longest = [&](SequenceCut cut) {
    double sum = 0;
    for (const auto& o : layers)
      if (o) sum += num_visible({0, sequence}, *o) * longest_share(*o, sequence, num_cp, cut);
    return sum;
  };
  return longest(SequenceCut::balanced) < 0.95 * longest(SequenceCut::contiguous)
             ? SequenceCut::balanced
             : SequenceCut::contiguous;
}

RopeTable rope_of(RopeTables& tables, const RopeConfig& config, const Tokens& tokens,
                  const Full& x) {
  const auto dtype = local(x).scalar_type();
  const auto device = local(x).device();
  if (!tokens.has_documents()) return tables.at(config, tokens.positions(), dtype, device);
  RopeTable table = tables.at(config, {{0, tokens.sequence()}}, dtype, device);
  table.positions_BL = local(tokens.document_positions());
  return table;
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

namespace {
// The i-th of `num` groups of heads.
template <auto L>
Tensor<L> group_of(const Tensor<L>& x, std::int64_t dim, std::size_t i, std::size_t num) {
  if (num == 1 || !local(x).defined()) return x;
  const std::int64_t length = local(x).size(dim) / static_cast<std::int64_t>(num);
  return narrow(x, dim, static_cast<std::int64_t>(i) * length, length);
}
}  // namespace

SeenKeys::SeenKeys(const Heads& k, const Heads& v, const Tokens& tokens, const AttentionOptions& o,
                   MaxLogits* logits)
    : tokens_(tokens), options_(o), logits_(logits) {
  const bool travels = current_mesh().size(cp) > 1, is_even = local(k).size(2) % 2 == 0;
  const std::size_t num = travels && is_even && !logits ? 2 : 1;
  for (std::size_t i = 0; i < num; ++i)
    groups_.push_back({start_seen_positions(group_of(k, 2, i, num), tokens, o),
                       start_seen_positions(group_of(v, 2, i, num), tokens, o)});
}

Heads SeenKeys::attend(const Heads& q, const PerHead& sinks) {
  std::vector<Heads> outputs;
  const std::size_t num = groups_.size();
  for (std::size_t i = 0; i < num; ++i) {
    const Heads keys = groups_[i].keys.wait(), values = groups_[i].values.wait(),
                queries = group_of(q, 2, i, num);
    if (logits_) logits_->see(queries, keys, tokens_, options_);
    outputs.push_back(
        nn::attend(queries, keys, values, group_of(sinks, 0, i, num), tokens_, options_));
  }
  return num == 1 ? outputs[0] : cat(outputs, 2);
}

std::pair<Heads, Heads> latent_heads(const Heads& kv, const Full& key, std::int64_t num_own) {
  raw::Tensors parts;
  const auto make = [&](const at::Tensor& heads, const at::Tensor& shared) {
    parts = raw::differentiable({heads, shared}, [&]() -> raw::Differentiable {
      const auto y = kernels::latent_heads_forward(heads, shared, num_own);
      return {{y.k_BLhd, y.v_BLhv}, {}, [num_own](const auto&, const auto& dy) {
                const auto d = kernels::latent_heads_backward(dy[0], dy[1], num_own);
                return raw::Tensors{d.kv, d.key};
              }};
    });
  };
  const auto part = [&](std::size_t i) {
    return map_heads(
        [&](const at::Tensor& heads, const at::Tensor& shared) {
          if (parts.empty()) make(heads, shared);
          return parts[i];
        },
        kv, key);
  };
  Heads k = part(0);
  return {std::move(k), part(1)};
}

// score = <q, W_k latent> = <W_k' q, latent>, and sum p W_v latent = W_v sum p latent.
// c latent, n num_own
Heads attend_latents(const Heads& q, const Full& latents,
                     const Tensor<Dense{Place::R, Place::R, Place::F}>& weight,
                     std::int64_t num_own, const Tokens& tokens, const AttentionOptions& options,
                     const KvCache& kv_cache) {
  const std::int64_t width = local(weight).size(1);
  const auto of_heads = [&](const at::Tensor& w, std::int64_t num_heads) {
    return w.reshape({num_heads, -1, width});
  };
  const Heads queries = map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& w) {
        const at::Tensor w_hnc = of_heads(w, q_BLhd.size(2)).narrow(1, 0, num_own);
        const at::Tensor own = q_BLhd.narrow(3, 0, num_own);
        return at::cat({at::einsum("blhn,hnc->blhc", {own, w_hnc}),
                        q_BLhd.narrow(3, num_own, q_BLhd.size(3) - num_own)},
                       3);
      },
      q, weight);
  // All heads have the same keys and values [B, S, d].
  const Heads y = map_heads(
      [&](const at::Tensor& q_BLhd, const at::Tensor& k_BSd) {
        const at::Tensor k_BS1d = k_BSd.unsqueeze(2);
        return attend_plain(q_BLhd, k_BS1d, k_BS1d.narrow(3, 0, width), {}, {}, tokens, options,
                            &kv_cache);
      },
      queries, latents);
  return map_heads(
      [&](const at::Tensor& y_BLhc, const at::Tensor& w) {
        const at::Tensor all = of_heads(w, y_BLhc.size(2));
        return at::einsum("blhc,hvc->blhv",
                          {y_BLhc, all.narrow(1, num_own, all.size(1) - num_own)});
      },
      y, weight);
}

}  // namespace moesh::nn
