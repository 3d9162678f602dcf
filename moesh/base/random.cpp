#include "moesh/base/random.h"

#include <cmath>
#include <numbers>

#include "moesh/base/error.h"

namespace moesh {
namespace {

__extension__ typedef unsigned __int128 uint128;

constexpr uint64_t join(uint32_t high, uint32_t low) { return (uint64_t{high} << 32) | low; }

// 53 random bits as a number in [0, 1).
double to_unit(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }

}  // namespace

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

Random::Random(uint64_t seed, std::string_view stream) : seed_(seed), stream_(0xcbf29ce484222325) {
  for (unsigned char c : stream) stream_ = (stream_ ^ c) * 0x100000001b3;
}

std::array<uint32_t, 4> Random::block(uint64_t index) const {
  return philox({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                 static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)},
                {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
}

uint64_t Random::bits(uint64_t index) const {
  const auto b = block(index);
  return join(b[1], b[0]);
}

double Random::uniform(uint64_t index) const { return to_unit(bits(index)); }

std::array<double, 2> Random::normal_pair(uint64_t pair) const {
  const auto b = block(pair);
  const double u = 1.0 - to_unit(join(b[1], b[0]));  // (0, 1]: the logarithm is finite
  const double radius = std::sqrt(-2.0 * std::log(u)),
               angle = 2.0 * std::numbers::pi * to_unit(join(b[3], b[2]));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

double Random::normal(uint64_t index) const { return normal_pair(index / 2)[index % 2]; }

void Random::normals(uint64_t first, std::span<double> out) const {
  for (size_t i = 0; i < out.size();) {
    const auto pair = normal_pair((first + i) / 2);
    for (uint64_t side = (first + i) % 2; side < 2 && i < out.size(); ++side) out[i++] = pair[side];
  }
}

uint64_t Random::below(uint64_t index, uint64_t bound) const {
  MOESH_CHECK(bound > 0, ErrorKind::config,
              "a random number below 0 was asked for; the bound must be 1 or more");
  // Multiply-shift maps 64 bits onto [0, bound); its bias is below bound / 2^64.
  return static_cast<uint64_t>((static_cast<uint128>(bits(index)) * bound) >> 64);
}

}  // namespace moesh
