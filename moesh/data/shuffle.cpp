#include "moesh/data/shuffle.h"

#include <algorithm>
#include <bit>

#include "moesh/base/error.h"

namespace moesh::data {

Shuffle::Shuffle(std::int64_t size, std::uint64_t seed, std::string_view stream)
    : size_(size), random_(seed, stream) {
  MOESH_CHECK(size >= 1, "a random order of ", size, " things");
  // Two halves of equal width: at most 4 * size values (64 where there are few: narrower halves mix
  // badly), so a few rounds are enough.
  half_bits_ =
      std::max(3, (static_cast<int>(std::bit_width(static_cast<std::uint64_t>(size - 1))) + 1) / 2);
}

std::uint64_t Shuffle::once(std::uint64_t value) const {
  constexpr std::uint64_t kRounds = 8;
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_, right = value & mask;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    const std::uint64_t mixed = left ^ (random_.bits((round << 32) + right) & mask);
    left = right;
    right = mixed;
  }
  return (left << half_bits_) | right;
}

std::int64_t Shuffle::at(std::int64_t place) const {
  MOESH_CHECK(place >= 0 && place < size_, "place ", place, " in a random order of ", size_);
  auto value = once(static_cast<std::uint64_t>(place));
  while (value >= static_cast<std::uint64_t>(size_)) value = once(value);
  return static_cast<std::int64_t>(value);
}

std::int64_t Epochs::at(std::int64_t index) const {
  const std::int64_t epoch = index / size, place = index % size;
  return shuffle ? Shuffle(size, seed, detail::concat("data: epoch ", epoch)).at(place) : place;
}

}  // namespace moesh::data
