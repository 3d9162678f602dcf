#pragma once
// The KV cache: what attention keeps of the tokens that it has seen, so that the next costs one
// row. B batch, S tokens that are kept, g key heads of this tp rank, d width of a head

#include <cstdint>
#include <vector>

#include "moesh/nn/residual.h"
#include "moesh/spmd/gather_ranges.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

using Heads = Tensor<Dense{Place::T, Place::T, Place::F}>;  // [B, L, h, d]: own positions

/// A query sees itself and the positions before it, as far as the window and its chunk reach.
struct AttentionOptions {
  double scale = 1;
  std::int64_t window = 0;  // tokens that a query sees, itself among them; 0: all
  // The sequence is cut into chunks of this many tokens, and a query sees its own; 0: one chunk.
  std::int64_t chunk = 0;
};

/// The KV cache of one layer, the same on every cp rank: keys as scores take them, rotated and
/// normalised, and values; or, where all heads make theirs of one latent, that latent and the
/// rotated key (DeepSeek: 576 numbers a token instead of 40,960).
class KvCache {
 public:
  /// The positions that are kept.
  PositionRange kept() const { return {begin_, end_}; }

  struct KeysAndValues {
    Heads keys_BSgd, values_BSgd;
  };
  /// Adds keys and values of new tokens, and returns all.
  const KeysAndValues& add(const Heads& keys, const Heads& values);
  /// The same for latents [B, L, d].
  const Full& add(const Full& latents);

  /// For a layer that carries a state instead (nn/delta_net.h): the state of this rank's heads.
  struct CarriedState {
    at::Tensor inputs;  // of its convolution, the last ones
    at::Tensor state;
  };
  CarriedState& carried() { return carried_; }

  /// Drops positions that no later token sees. The rest begins with a whole chunk.
  void forget(const AttentionOptions& options);

 private:
  std::int64_t begin_ = 0, end_ = 0;
  KeysAndValues heads_;
  Full latents_;
  CarriedState carried_;
};

/// The KV cache of every layer of a model.
struct ModelKvCache {
  std::vector<KvCache> layers;
  std::int64_t num_tokens = 0;  // of each sequence, up to now
};

}  // namespace moesh::nn
