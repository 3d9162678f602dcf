#include "tests/nn/dropout_check.h"

#include <ATen/ATen.h>

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/linear.h"

namespace moesh::dropout_check {
namespace {

std::uint32_t mixed(std::uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352dU;
  x ^= x >> 15, x *= 0x2c1b3c6dU;
  return x ^ x >> 16;
}

constexpr double kRate = 0.3;
constexpr std::int64_t kIn = 12, kOut = 5, kRank = 3, kB = 2, kL = 6;

// Which features of a token are dropped in the layer "l" with seed 5.
bool is_dropped(std::int64_t token, std::int64_t feature) {
  const Random random(5, "l.lora_dropout");
  const auto of_tokens = static_cast<std::uint32_t>(random.bits(0) >> 32),
             of_features = static_cast<std::uint32_t>(random.bits(1) >> 32);
  const auto low = static_cast<std::uint32_t>(token),
             high = static_cast<std::uint32_t>(token >> 32);
  const std::uint32_t bits = mixed(mixed(mixed(low ^ of_tokens) ^ high) ^
                                   mixed(static_cast<std::uint32_t>(feature) ^ of_features));
  return bits < std::ldexp(kRate, 32);
}

}  // namespace

std::string complaint() {
  const OneRankScope scope;
  at::manual_seed(11);
  nn::ModuleOptions o{.dtype = at::kDouble};
  o.init.seed = 5;
  o.lora = [](const std::string&) {
    return nn::LoraConfig{.rank = kRank, .scale = 1.5, .zero_b = false, .dropout = kRate};
  };
  auto layer = nn::column("l", kOut, kIn, o);
  std::vector<at::Tensor> parameters;
  layer.each_param([&](auto& w) { parameters.push_back(w.stored().value); });
  const at::Tensor w = parameters[0], a = parameters[1], b = parameters[2];
  // Numbers of more than 32 bits, too.
  const at::Tensor numbers =
      at::arange(kB * kL, at::kLong).view({kB, kL}) + (std::int64_t{7} << 32) - 3;
  at::Tensor factors = at::empty({kB, kL, kIn}, at::kDouble);
  for (std::int64_t t = 0; t < kB * kL; ++t)
    for (std::int64_t f = 0; f < kIn; ++f)
      factors.view({-1, kIn})[t][f] =
          is_dropped(numbers.view(-1)[t].item<std::int64_t>(), f) ? 0 : 1 / (1 - kRate);
  const at::Tensor x = at::randn({kB, kL, kIn}, at::kDouble).requires_grad_(true),
                   dy = at::randn({kB, kL, kOut}, at::kDouble);
  const auto typed = assume<Dense{Place::T, Place::T, Place::R}>(x);
  const auto differs = [](const at::Tensor& found, const at::Tensor& wanted) {
    return !at::allclose(found, wanted, 1e-12, 1e-12);
  };
  const at::Tensor by_hand = at::linear(x, w) + 1.5 * at::linear(at::linear(x * factors, a), b);
  const at::Tensor y = local(layer(typed, numbers));
  if (differs(y, by_hand)) return "the output is not that of the formula";
  for (const auto& p : parameters) p.mutable_grad().reset();
  by_hand.backward(dy);
  std::vector<at::Tensor> wanted{x.grad(), a.grad(), b.grad()};
  x.mutable_grad().reset();
  for (const auto& p : parameters) p.mutable_grad().reset();
  y.backward(dy);
  const std::vector<at::Tensor> found{x.grad(), a.grad(), b.grad()};
  for (std::size_t i = 0; i < found.size(); ++i)
    if (differs(found[i], wanted[i]))
      return detail::concat("the gradient of ", "xAB"[i], " is not that of the formula");
  if (differs(local(layer(typed)), at::linear(x, w) + 1.5 * at::linear(at::linear(x, a), b)))
    return "without numbers something is dropped";
  return "";
}

}  // namespace moesh::dropout_check
