#pragma once
// A random order that needs no memory: the item at a place is computed from the place.

#include <cstdint>
#include <string_view>

#include "moesh/base/random.h"

namespace moesh::data {

/// A permutation of 0 .. size - 1 that depends only on seed and stream: a Feistel network, applied
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

/// The order in which a run goes through `size` items, epoch after epoch: each epoch in another
/// random order, or always in their own order.
struct Epochs {
  std::int64_t size = 0;
  std::uint64_t seed = 0;
  bool shuffle = true;

  /// The sample at an index of the run.
  std::int64_t at(std::int64_t index) const;
};

}  // namespace moesh::data
