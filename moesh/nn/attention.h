#pragma once
// Softmax attention of the heads that a tp rank holds. Queries are the tokens of this cp rank, keys
// and values those that they see, also of other cp ranks. B batch, L tokens of this cp rank, S
// tokens that they see, h heads of this tp rank, d width of a head

#include <cmath>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "moesh/fsdp/param.h"
#include "moesh/nn/kv_cache.h"
#include "moesh/nn/residual.h"
#include "moesh/nn/rope.h"
#include "moesh/nn/tokens.h"
#include "moesh/spmd/gather_ranges.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

using PerHead = Tensor<Dense{Place::R, Place::R, Place::F}>;  // [h]: a number of each own head

/// [B, L, h * width] -> [B, L, h, width], and back.
Heads split_heads(const Tensor<Dense{Place::T, Place::T, Place::F}>& x, std::int64_t width);
Tensor<Dense{Place::T, Place::T, Place::F}> merge_heads(const Heads& x);

/// For each cp rank, the positions that its queries may see, its own among them: for each range of
/// them up to its end, and from a multiple of the chunk. Without a window or chunk all ranks see
/// the whole. Shapes do not depend on where documents begin: a chunk, which counts from there, is
/// as a window.
std::vector<PositionRanges> seen_ranges(const Tokens& tokens, const AttentionOptions& options);

/// [B, L, ..] of this cp rank's tokens -> [B, S, ..] of the tokens that its queries see
/// (`seen_ranges`): only these are sent. Keys and values may be made before or after, whichever
/// makes the message smaller.
template <auto L>
Moving<Tensor<L>> start_seen_positions(const Tensor<L>& x, const Tokens& tokens,
                                       const AttentionOptions& options) {
  return start_gather_ranges<cp>(
      x, {.dim = 1, .held = tokens.spans(), .asked = seen_ranges(tokens, options)});
}

/// The numbers of their tokens (Tokens::numbers).
at::Tensor seen_numbers(const Tokens& tokens, const AttentionOptions& options);

/// [B, L, ..] of this cp rank's tokens -> [B, S, ..] of all cp ranks, for a cache that every rank
/// keeps.
template <auto L>
Tensor<L> all_positions(const Tensor<L>& x, const Tokens& tokens) {
  const auto spans = tokens.spans();
  const std::vector<PositionRanges> whole(spans.size(), {{0, tokens.sequence()}});
  return gather_ranges<cp>(x, {.dim = 1, .held = spans, .asked = whole});
}

/// How many keys the queries at these positions see, all of them together; and how many a query
/// sees, on average over a sequence.
double num_visible(const PositionRange& queries, const AttentionOptions& options);
double mean_visible(std::int64_t sequence, const AttentionOptions& options);
/// How many keys the queries of the cp rank see that has the most of them, divided by the mean of
/// the cp ranks.
double longest_share(const AttentionOptions& options, std::int64_t sequence, int num_cp,
                     SequenceCut cut);
/// The cut for layers with these options (none: a layer whose work is the same for every token). It
/// is balanced where that takes 5 % off the longest ranks of all layers: a window needs rows before
/// each of two ranges then, and a layer runs two kernels.
SequenceCut cheaper_cut(const std::vector<std::optional<AttentionOptions>>& layers,
                        std::int64_t sequence, int num_cp);

/// The lines of a table for the positions of this cp rank's tokens, in their documents if they have
/// any.
RopeTable rope_of(RopeTables& tables, const RopeConfig& config, const Tokens& tokens,
                  const Full& x);

/// Causal attention, [B, L, h, d of v]; k and v are of start_seen_positions with the same options,
/// or all that `kv_cache` holds, if there is one. h may be smaller for them (grouped queries). A
/// query sees only its own document. With sinks, one in each head: softmax over [scores, sink], and
/// the last is dropped; undefined: none.
Heads attend(const Heads& q, const Heads& k, const Heads& v, const PerHead& sinks,
             const Tokens& tokens, const AttentionOptions& options,
             const KvCache* kv_cache = nullptr);

/// The largest logit of each own head, a scaled score before the softmax, of all queries and the
/// keys that they see, since `clear`: of this rank's tokens.
class MaxLogits {
 public:
  /// Computes the scores once more, since kernels do not return them: in blocks of `most_scores`
  /// (128 MiB), or of one query. k is of start_seen_positions with the same options.
  void see(const Heads& q, const Heads& k, const Tokens& tokens, const AttentionOptions& options,
           std::int64_t most_scores = std::int64_t{1} << 25);
  /// float32 (float64 in float64 runs) [h]; -infinity where nothing was seen.
  const at::Tensor& largest_h() const { return largest_h_; }
  void clear() { largest_h_.fill_(-INFINITY); }

 private:
  at::Tensor largest_h_;  // written in place: a CUDA graph of a step has its address
};

/// Keys and values on their way between cp ranks, for attention without a cache. Those of half the
/// heads travel while attention of the other half computes, in backward too, where a rank has an
/// even number of key heads and cp several ranks.
class SeenKeys {
 public:
  /// `logits`, if given, sees those of these tokens; then all heads are awaited first.
  SeenKeys(const Heads& k, const Heads& v, const Tokens& tokens, const AttentionOptions& options,
           MaxLogits* logits);
  /// attend(..) with what has travelled. Once.
  Heads attend(const Heads& q, const PerHead& sinks);

 private:
  struct OnTheWay {
    Moving<Heads> keys, values;
  };
  const Tokens& tokens_;
  AttentionOptions options_;
  MaxLogits* logits_;
  std::vector<OnTheWay> groups_;  // of heads
};

/// Rows of a weight that scale the logits of a head: [begin, begin + count) of the `of_head` rows
/// of each head. Multiplying all such rows of the attention by f ^ power multiplies the logits by
/// f.
struct LogitRows {
  Stored* weight;
  std::int64_t of_head, begin, count;
  double power;
};

/// The interface of attention in a decoder's block, whatever the kind.
class Attention {
 public:
  virtual ~Attention() = default;
  /// With a `kv_cache`, the tokens follow those that it has kept, and it keeps these. `logits`, if
  /// given, sees those of these tokens.
  virtual Sum operator()(const Full& x_BLD, const Tokens& tokens, KvCache* kv_cache = nullptr,
                         MaxLogits* logits = nullptr) const = 0;
  /// Empty if no scaling of weights scales the logits, for example with normalised queries.
  virtual std::vector<LogitRows> logit_rows() { return {}; }
  MaxLogits& max_logits() { return max_logits_; }
  /// Every parameter, in forward order.
  virtual void each_param(const std::function<void(Stored&)>& f) = 0;
  /// FLOPs of scores and values per token, forward and backward, at this sequence length.
  virtual double flops(std::int64_t sequence) const = 0;
  /// What a query sees; nothing: a state is carried along, and all tokens cost the same.
  virtual std::optional<AttentionOptions> sees() const = 0;

 private:
  MaxLogits max_logits_;
};

// The heads of latent attention, differentiable.

/// Keys and values of the heads: kv [B, L, h, num_own + v] has num_own features of each key, the
/// others are in key [B, L, r], which all heads share.
std::pair<Heads, Heads> latent_heads(const Heads& kv, const Full& key, std::int64_t num_own);

/// Attention on the latents [B, S, latent + r] of `kv_cache`: latent and key of each token.
/// `weight` [h * (num_own + v), latent] makes keys and values from a latent. Here it is applied to
/// queries and results instead, so that keys of earlier tokens are not made again. q is [B, L, h,
/// num_own + r], the result [B, L, h, v].
Heads attend_latents(const Heads& q, const Full& latents,
                     const Tensor<Dense{Place::R, Place::R, Place::F}>& weight,
                     std::int64_t num_own, const Tokens& tokens, const AttentionOptions& options,
                     const KvCache& kv_cache);

}  // namespace moesh::nn
