#pragma once
// The heads of latent attention, from what the latent gives each head and the key that all share:
// data that moves, in one pass. B batch, L positions, h heads, n features of a key of its own, r
// shared ones, v features of a value

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

struct LatentHeads {
  at::Tensor k_BLhd;  // [B, L, h, n + r]: the first n features of kv, then those of the shared key
  at::Tensor v_BLhv;  // the other features of kv
};

/// kv is [B, L, h, n + v], key [B, L, r], both of one dtype; num_own is n.
LatentHeads latent_heads_forward(const at::Tensor& kv, const at::Tensor& key, std::int64_t num_own);

struct LatentGradients {
  at::Tensor kv, key;
};
/// The gradient of the shared key is the sum over the heads, in float32 or wider.
LatentGradients latent_heads_backward(const at::Tensor& dk, const at::Tensor& dv,
                                      std::int64_t num_own);

}  // namespace moesh::kernels
