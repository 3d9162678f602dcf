#pragma once
// What is cut over the vocabulary: embedding and cross-entropy. The full logits exist on no rank.

#include <string>

#include "moesh/spmd/param.h"
#include "moesh/spmd/tensor.h"

namespace moesh::nn {

/// Token embedding [V, D], own rows of the vocabulary on tp.
class Embedding {
 public:
  using Weight = Param<Dense{Place::I, Place::I, Place::F}>;
  Embedding() = default;
  Embedding(const std::string& name, std::int64_t vocab, std::int64_t dim, at::ScalarType dtype,
            at::Device device, const Init& init);

  /// ids [B, L], the same on all tp ranks -> rows of the ids that this rank has, zeros elsewhere: a
  /// partial sum.
  Tensor<Dense{Place::T, Place::T, Place::P}> operator()(const at::Tensor& ids_BL) const;

  Weight& weight() { return weight_; }
  const Weight& weight() const { return weight_; }

 private:
  Weight weight_;
};

/// -log softmax(logits)[label] of every token, 0 where the label is -100. Logits [N, V of this
/// rank] of the vocabulary [start, start + V): F on tp -> I on tp. Three numbers a token travel,
/// never the logits.
Tensor<Dense{Place::T, Place::T, Place::I}> cross_entropy(
    const Tensor<Dense{Place::T, Place::T, Place::F}>& logits_NV, const at::Tensor& labels_N,
    std::int64_t vocab);

}  // namespace moesh::nn
