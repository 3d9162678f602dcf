#pragma once
// The heads of latent attention, differentiable.

#include <utility>

#include "moesh/nn/attention.h"

namespace moesh::nn {

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
