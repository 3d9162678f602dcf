#pragma once
// A random order that needs no memory: what comes at a place is computed from the place.

#include <cstdint>
#include <string_view>

#include "moesh/base/random.h"

namespace moesh::data {

/// A permutation of 0 .. size - 1 that depends on seed and stream alone: a Feistel network, applied
/// again until the result is below size.
class Shuffle {
 public:
  Shuffle(std::int64_t size, std::uint64_t seed, std::string_view stream);
  std::int64_t at(std::int64_t place) const;

 private:
  std::uint64_t once(std::uint64_t value) const;

  std::int64_t size_;
  int half_bits_ = 0;
  Random random_;
};

}  // namespace moesh::data
