#pragma once
// Documents for tests of attention.

#include <ATen/ATen.h>

#include <vector>

namespace moesh {

/// int64 [B, L]: where the document of each query begins, as a key, from the lengths of the
/// documents of each sequence. The first query is key `start`, and the first document begins at key
/// `first`.
inline at::Tensor starts_of(const std::vector<std::vector<std::int64_t>>& lengths,
                            std::int64_t first = 0, std::int64_t start = 0) {
  std::vector<at::Tensor> sequences;
  for (const auto& of_sequence : lengths) {
    std::vector<std::int64_t> starts;
    for (const std::int64_t n : of_sequence)
      starts.insert(starts.end(), static_cast<std::size_t>(n),
                    starts.empty() ? first : start + std::ssize(starts));
    sequences.push_back(at::tensor(starts));
  }
  return at::stack(sequences);
}

}  // namespace moesh
