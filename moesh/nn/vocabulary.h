#pragma once
// Layers that are split over the vocabulary: embedding and cross-entropy. All logits of a batch
// exist on no rank.

#include <string>

#include "moesh/nn/linear.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

/// Token embedding [V, D], own rows of the vocabulary on tp.
class Embedding {
 public:
  Embedding() = default;
  Embedding(const std::string& name, std::int64_t vocab, std::int64_t dim, const ModuleOptions& o);

  /// ids [B, L], the same on all tp ranks -> rows of the ids that this rank has, zeros elsewhere: a
  /// partial sum.
  Tensor<Dense{Place::T, Place::T, Place::P}> operator()(const at::Tensor& ids_BL) const;

  Cut& weight() { return weight_; }
  const Cut& weight() const { return weight_; }

 private:
  Cut weight_;
};

/// The number of tokens whose logits exist at once, for a rank with this many words: 64 M numbers,
/// or a thousand tokens, as each chunk adds to a gradient of the size of the weights.
std::int64_t loss_chunk(std::int64_t words);

/// The sum over the tokens of -log softmax(x w')[label], 0 where the label is kIgnoredLabel; w has
/// this rank's words. R and F on tp -> I on tp. Logits exist for `chunk` tokens at a time (0:
/// loss_chunk), their gradient takes their place, and both are gone before the next chunk. Three
/// numbers a token travel, never the logits.
Tensor<Dense{Place::P, Place::P, Place::I}> cross_entropy(
    const Tensor<Dense{Place::T, Place::T, Place::R}>& x_ND,
    const Tensor<Dense{Place::R, Place::R, Place::F}>& weight_VD, const at::Tensor& labels_N,
    std::int64_t vocab, std::int64_t chunk = 0);

/// The word with the largest logit of each token, the first of those that have it; without a
/// gradient. Two numbers a token travel.
Tensor<Dense{Place::T, Place::T, Place::R}> best_words(
    const Tensor<Dense{Place::T, Place::T, Place::R}>& x_ND,
    const Tensor<Dense{Place::R, Place::R, Place::F}>& weight_VD, std::int64_t vocab);

}  // namespace moesh::nn
