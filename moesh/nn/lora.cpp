#include "moesh/nn/lora.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>

#include <cmath>

#include "moesh/base/random.h"

namespace moesh::nn {
namespace {

constexpr std::int64_t k32Bits = 0xffffffff;

// Each bit of 32 becomes a function of all of them. Products of a number of 32 bits and one of 31
// do not overflow.
at::Tensor mixed(at::Tensor bits) {
  bits = bits.bitwise_xor(bits.bitwise_right_shift(16)).mul_(0x7feb352d).bitwise_and_(k32Bits);
  bits = bits.bitwise_xor(bits.bitwise_right_shift(15)).mul_(0x2c1b3c6d).bitwise_and_(k32Bits);
  return bits.bitwise_xor(bits.bitwise_right_shift(16));
}

}  // namespace

Dropout::Dropout(double rate, std::uint64_t seed, const std::string& layer) : rate_(rate) {
  const Random random(seed, layer + ".lora_dropout");
  of_tokens_ = static_cast<std::int64_t>(random.bits(0) >> 32);
  of_features_ = static_cast<std::int64_t>(random.bits(1) >> 32);
}

// LibTorch ops, where the numbers are: nothing waits, and a CUDA graph may hold it.
at::Tensor Dropout::factors(const at::Tensor& numbers, std::int64_t first, std::int64_t count,
                            at::ScalarType dtype) const {
  const at::NoGradGuard no_grad;
  const at::Tensor low = numbers.bitwise_and(k32Bits), high = numbers.bitwise_right_shift(32);
  const at::Tensor tokens = mixed(mixed(low.bitwise_xor(of_tokens_)).bitwise_xor_(high));
  const at::Tensor features =
      mixed(at::arange(first, first + count, numbers.options()).bitwise_xor_(of_features_));
  const at::Tensor bits = mixed(tokens.unsqueeze(-1).bitwise_xor(features));
  const auto border = static_cast<std::int64_t>(std::ldexp(rate_, 32));
  return bits.ge(border).to(dtype).mul_(1 / (1 - rate_));
}

}  // namespace moesh::nn
