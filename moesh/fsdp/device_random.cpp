#include "moesh/fsdp/device_random.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <numbers>

namespace moesh::raw {
namespace {

constexpr std::int64_t kWord = 0xFFFFFFFF;

// 32-bit words are numbers in int64; a product of two wraps, and its bits are those of uint64.
at::Tensor low(const at::Tensor& x) { return x.bitwise_and(kWord); }
at::Tensor high(const at::Tensor& x) { return x.bitwise_right_shift(32).bitwise_and_(kWord); }

std::int64_t low(std::uint64_t x) { return static_cast<std::int64_t>(x & kWord); }
std::int64_t high(std::uint64_t x) { return static_cast<std::int64_t>(x >> 32); }

// Philox4x32-10, as in base/random.cpp, of the blocks with these numbers.
std::array<at::Tensor, 4> philox(const Random& random, const at::Tensor& block) {
  std::array<at::Tensor, 4> c{low(block), high(block), at::full_like(block, low(random.stream())),
                              at::full_like(block, high(random.stream()))};
  std::int64_t key0 = low(random.seed()), key1 = high(random.seed());
  for (int round = 0; round < 10; ++round) {
    const at::Tensor p0 = c[0] * std::int64_t{0xD2511F53}, p1 = c[2] * std::int64_t{0xCD9E8D57};
    c = {high(p1).bitwise_xor_(c[1]).bitwise_xor_(key0), low(p1),
         high(p0).bitwise_xor_(c[3]).bitwise_xor_(key1), low(p0)};
    key0 = (key0 + 0x9E3779B9) & kWord;
    key1 = (key1 + 0xBB67AE85) & kWord;
  }
  return c;
}

// The upper 53 of 64 bits as a number in [0, 1).
at::Tensor to_unit(const at::Tensor& upper, const at::Tensor& lower) {
  return upper.bitwise_left_shift(21)
      .bitwise_or_(lower.bitwise_right_shift(11))
      .to(at::kDouble)
      .mul_(0x1.0p-53);
}

struct Pair {
  at::Tensor even, odd;
};
Pair normal_pairs(const Random& random, const at::Tensor& pair) {
  const auto c = philox(random, pair);
  const at::Tensor radius = at::rsub(to_unit(c[1], c[0]), 1.0).log_().mul_(-2.0).sqrt_(),
                   angle = to_unit(c[3], c[2]).mul_(2.0 * std::numbers::pi);
  return {radius * angle.cos(), radius * angle.sin()};
}

at::Tensor values(const Init& init, const Random& random, const at::Tensor& index) {
  if (init.kind == Init::Distribution::normal) return normals(random, index).mul_(init.scale);
  const at::Tensor u = uniforms(random, index);
  return init.kind == Init::Distribution::log_uniform
             ? u.mul_(init.scale - Init::kLeast).add_(Init::kLeast).log_()
             : u.mul_(2).sub_(1).mul_(init.scale);
}

}  // namespace

at::Tensor uniforms(const Random& random, const at::Tensor& index) {
  const auto c = philox(random, index);
  return to_unit(c[1], c[0]);
}

at::Tensor normals(const Random& random, const at::Tensor& index) {
  const auto [even, odd] = normal_pairs(random, index.bitwise_right_shift(1));
  return at::where(index.bitwise_and(1).eq(0), even, odd);
}

void fill_on_device(const at::Tensor& out, const std::vector<std::int64_t>& shape,
                    const std::vector<std::int64_t>& start, const Init& init, const Random& random,
                    std::int64_t chunk) {
  if (init.kind == Init::Distribution::zeros) return static_cast<void>(out.zero_());
  if (init.kind == Init::Distribution::ones) return static_cast<void>(out.fill_(init.scale));
  const at::Tensor flat = out.view({-1});
  // Where every line begins with the first number of a pair and ends with a second, each block of
  // random bits is made once.
  const bool in_pairs = init.kind == Init::Distribution::normal && shape.back() % 2 == 0 &&
                        start.back() % 2 == 0 && out.size(-1) % 2 == 0;
  for (std::int64_t begin = 0; begin < flat.numel(); begin += chunk) {
    const std::int64_t count = std::min(chunk, flat.numel() - begin);
    at::Tensor rest =
        at::arange(begin, begin + count, in_pairs ? 2 : 1, out.options().dtype(at::kLong));
    at::Tensor index = at::zeros_like(rest);
    std::int64_t stride = 1;
    for (std::int64_t d = out.dim() - 1; d >= 0; --d) {
      const auto length = out.size(d);
      index.add_(rest.remainder(length).add_(start[static_cast<size_t>(d)]), stride);
      rest = rest.div(length, "floor");
      stride *= shape[static_cast<size_t>(d)];
    }
    at::Tensor part = flat.narrow(0, begin, count);
    if (in_pairs) {
      const auto [even, odd] = normal_pairs(random, index.bitwise_right_shift(1));
      part.copy_(at::stack({even, odd}, 1).mul_(init.scale).view({-1}));
    } else {
      part.copy_(values(init, random, index));
    }
  }
}

}  // namespace moesh::raw
