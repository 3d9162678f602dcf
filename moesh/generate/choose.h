#pragma once
// The next token, chosen from the logits of all of them.

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace moesh::generate {

struct ChooseOptions {
  double temperature = 0;  // logits are divided by it; 0: the largest is taken, always
  // Only the likeliest tokens are drawn from, as few as together have this probability.
  double top_p = 1;
  std::uint64_t seed = 0;

  void validate() const;
};

/// The id of one of the tokens whose logits [V] these are; `index` is the number of the choice, so
/// that a text depends on the seed and on nothing that happened before. Of equal logits the first
/// is taken, and is the likelier for top_p.
std::int64_t choose_token(const at::Tensor& logits_V, const ChooseOptions& options,
                          std::int64_t index);

}  // namespace moesh::generate
