#pragma once
// The heads of latent attention, differentiable.

#include <utility>

#include "moesh/nn/attention.h"

namespace moesh::nn {

/// Keys and values of the heads: kv [B, L, h, num_own + v] has num_own features of each key, the
/// others are in key [B, L, r], which all heads share.
std::pair<Heads, Heads> latent_heads(const Heads& kv, const Full& key, std::int64_t num_own);

}  // namespace moesh::nn
