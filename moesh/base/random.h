#pragma once
// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", 2011). A value depends on (seed, stream, index) and on nothing else, so it cannot
// depend on the mesh.

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace moesh {

/// One Philox4x32-10 block.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

/// A stream of random numbers with random access.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  /// A stream named by a text, such as a parameter's name (FNV-1a).
  Random(uint64_t seed, std::string_view stream);

  uint64_t seed() const { return seed_; }
  uint64_t stream() const { return stream_; }

  uint64_t bits(uint64_t index) const;
  /// In [0, 1), 53 bits.
  double uniform(uint64_t index) const;
  /// Mean 0, standard deviation 1 (Box-Muller: one block gives the values of an even index and the
  /// next).
  double normal(uint64_t index) const;
  /// normal(first), normal(first + 1), ..: half of the work for each.
  void normals(uint64_t first, std::span<double> out) const;
  /// In [0, bound); bound > 0. The bias is below bound / 2^64.
  uint64_t below(uint64_t index, uint64_t bound) const;

 private:
  std::array<uint32_t, 4> block(uint64_t index) const;
  std::array<double, 2> normal_pair(uint64_t pair) const;
  uint64_t seed_;
  uint64_t stream_;
};

}  // namespace moesh
