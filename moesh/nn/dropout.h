#pragma once
// Dropout of what goes into LoRA's A. Which numbers are dropped depends on the seed, the layer, the
// number of a token in the run, and the feature: never on the rank, nor on how a step is cut. A
// recompute drops the same.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace moesh::nn {

class Dropout {
 public:
  Dropout(double rate, std::uint64_t seed, const std::string& layer);

  /// [rows.., count] of 0, where a number is dropped, and 1 / (1 - rate), for `count` features from
  /// `first` on of the tokens with these numbers [rows..] (Tokens::numbers).
  at::Tensor factors(const at::Tensor& numbers, std::int64_t first, std::int64_t count,
                     at::ScalarType dtype) const;

 private:
  double rate_;
  std::int64_t of_tokens_, of_features_;  // 32 random bits of the layer each
};

}  // namespace moesh::nn
