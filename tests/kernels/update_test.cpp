// AdamW against its formula in float64 and against LibTorch's fused kernel; the sum of squares
// against float64.

#include "moesh/kernels/update.h"

#include <ATen/ops/_fused_adamw.h>

#include <array>
#include <cmath>

#include "moesh/base/error.h"
#include "moesh/kernels/table.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

constexpr double kBeta1 = 0.8, kBeta2 = 0.9, kEps = 1e-6;

struct Numbers {
  double lr = 0.05, number = 3, factor = 0.25, skip = 0;
};

AdamWNumbers numbers_of(const Numbers& n) {
  return {kBeta1, kBeta2, kEps,
          at::tensor({n.lr, n.number, n.factor, n.skip}, at::kDouble).to(test_device())};
}

AdamWParam param(std::int64_t size, at::ScalarType dtype, int i, bool with_copy) {
  const auto tensor = [&](const char* name) {
    return normal({size}, name + std::to_string(i), dtype);
  };
  AdamWParam p{.value = tensor("value"),
               .gradient = tensor("gradient"),
               .mean = tensor("mean"),
               .mean_square = tensor("square").abs_(),
               .weight_decay = i % 2 ? 0.3 : 0};
  if (with_copy) p.copy = at::zeros({size}, p.value.options().dtype(at::kBFloat16));
  return p;
}

AdamWParam wide_clone(const AdamWParam& p) {
  const auto clone = [](const at::Tensor& t) { return t.cpu().to(at::kDouble).clone(); };
  return {.value = clone(p.value),
          .gradient = clone(p.gradient),
          .mean = clone(p.mean),
          .mean_square = clone(p.mean_square),
          .weight_decay = p.weight_decay};
}

// Element by element, as the paper has it.
void move(AdamWParam& p, const Numbers& n) {
  auto *w = p.value.data_ptr<double>(), *m = p.mean.data_ptr<double>(),
       *v = p.mean_square.data_ptr<double>();
  for (std::int64_t i = 0; i < p.value.numel(); ++i) {
    const double g = p.gradient.data_ptr<double>()[i] * n.factor;
    m[i] = kBeta1 * m[i] + (1 - kBeta1) * g;
    v[i] = kBeta2 * v[i] + (1 - kBeta2) * g * g;
    const double mean = m[i] / (1 - std::pow(kBeta1, n.number)),
                 square = v[i] / (1 - std::pow(kBeta2, n.number));
    w[i] -= n.lr * p.weight_decay * w[i] + n.lr * mean / (std::sqrt(square) + kEps);
  }
}

std::vector<std::int64_t> sizes() {
  std::vector<std::int64_t> all{0, 1, 2, 3, 4, 5, 1003, 8191, 8192, 8193, 40'003};
  while (all.size() < 450) all.push_back(static_cast<std::int64_t>(7 + all.size() % 90));
  return all;
}

TEST(AdamW, IsItsFormulaForAListOfTensors) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    std::vector<AdamWParam> params, wide;
    int i = 0;
    for (const auto size : sizes()) {
      params.push_back(param(size, dtype, i, i % 3 == 0));
      wide.push_back(wide_clone(params.back()));
      ++i;
    }
    for (const auto& n : {Numbers{}, Numbers{.lr = 0.01, .number = 4, .factor = 1}}) {
      adamw_(numbers_of(n), params);
      for (auto& p : wide) move(p, n);
    }
    const double tol = dtype == at::kDouble ? 1e-13 : 5e-7;
    for (std::size_t k = 0; k < params.size(); ++k) {
      const std::string what = "tensor " + std::to_string(k);
      expect_close(params[k].value, wide[k].value, tol, what + ", value");
      expect_close(params[k].mean, wide[k].mean, tol, what + ", mean");
      expect_close(params[k].mean_square, wide[k].mean_square, tol, what + ", mean of squares");
      if (params[k].copy.defined())
        expect_equal(params[k].copy, params[k].value.to(at::kBFloat16), what + ", copy");
    }
  }
}

TEST(AdamW, IsLibTorchsFusedOne) {
  const Numbers n{.factor = 1};
  AdamWParam p = param(40'003, at::kFloat, 1, false);
  const auto clone = [](const at::Tensor& t) { return t.clone(); };
  std::vector<at::Tensor> w{clone(p.value)}, g{clone(p.gradient)}, m{clone(p.mean)},
      v{clone(p.mean_square)}, step{at::full({}, n.number, p.value.options())};
  at::_fused_adamw_(w, g, m, v, {}, step, n.lr, kBeta1, kBeta2, p.weight_decay, kEps,
                    /*amsgrad=*/false, /*maximize=*/false);
  adamw_(numbers_of(n), {p});
  expect_close(p.value, w[0], 1e-6, "value");
  expect_close(p.mean, m[0], 1e-6, "mean");
  expect_close(p.mean_square, v[0], 1e-6, "mean of squares");
}

// The path of other devices, and of kernels.gpu = library.
TEST(AdamW, IsThatOfLibTorchsOps) {
  for (const auto dtype : {at::kFloat, at::kDouble})
    for (const Numbers& n : {Numbers{}, Numbers{.skip = 1}}) {
      AdamWParam a = param(1003, dtype, 1, true), b = param(1003, dtype, 1, true);
      adamw_(numbers_of(n), {a});
      aten_kernels().adamw_(numbers_of(n), {b});
      const double tol = dtype == at::kDouble ? 1e-13 : 1e-6;
      expect_close(a.value, b.value, tol, "value");
      expect_close(a.mean, b.mean, tol, "mean");
      expect_close(a.mean_square, b.mean_square, tol, "mean of squares");
    }
}

// Weights that were gathered ahead are used only while the value has the version that they had.
TEST(AdamW, RaisesTheVersionOfWhatItWrites) {
  const AdamWParam p = param(1003, at::kFloat, 1, true);
  const auto versions = [&] {
    return std::array{p.value._version(), p.mean._version(), p.mean_square._version()};
  };
  const auto before = versions();
  adamw_(numbers_of({}), {p});
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_GT(versions()[i], before[i]) << i;
}

TEST(AdamW, WritesNothingInAStepThatIsSkipped) {
  const AdamWParam before = param(1003, at::kFloat, 1, true);
  for (const double number : {std::nan(""), 0.5}) {
    AdamWParam p = param(1003, at::kFloat, 1, true);
    p.gradient.fill_(number);
    adamw_(numbers_of({.factor = number, .skip = 1}), {p});
    expect_equal(p.value, before.value, "value");
    expect_equal(p.mean, before.mean, "mean");
    expect_equal(p.mean_square, before.mean_square, "mean of squares");
    expect_equal(p.copy, before.copy, "copy");
  }
}

// No bit depends on where a shard begins, in float32 too, and on no number of threads.
TEST(AdamW, GivesTheSameBitsInPieces) {
  AdamWParam whole = param(40'003, at::kFloat, 1, false), cut = param(40'003, at::kFloat, 1, false);
  adamw_(numbers_of({}), {whole});
  for (std::int64_t begin = 0, n = 1; begin < cut.value.numel(); begin += n, n = n * 3 + 1) {
    n = std::min(n, cut.value.numel() - begin);
    const auto part = [&](const at::Tensor& x) { return x.narrow(0, begin, n).clone(); };
    AdamWParam piece{.value = part(cut.value),
                     .gradient = part(cut.gradient),
                     .mean = part(cut.mean),
                     .mean_square = part(cut.mean_square),
                     .weight_decay = cut.weight_decay};
    adamw_(numbers_of({}), {piece});
    cut.value.narrow(0, begin, n).copy_(piece.value);
  }
  expect_equal(cut.value, whole.value, "value");
}

// A gradient in bfloat16 is one of float32 with zeros behind it.
TEST(AdamW, GivesTheSameBitsFromANarrowGradient) {
  for (const auto dtype : {at::kFloat, at::kDouble})
    for (const bool by_aten : {false, true})
      for (const std::int64_t size : {1, 3, 8, 1003, 40'003}) {
        AdamWParam narrow = param(size, dtype, 1, true), wide = param(size, dtype, 1, true);
        narrow.gradient = narrow.gradient.to(at::kBFloat16);
        wide.gradient = narrow.gradient.to(dtype);
        const auto move = [&](const AdamWParam& p) {
          by_aten ? aten_kernels().adamw_(numbers_of({}), {p}) : adamw_(numbers_of({}), {p});
        };
        move(narrow), move(wide);
        expect_equal(narrow.value, wide.value, "value");
        expect_equal(narrow.mean, wide.mean, "mean");
        expect_equal(narrow.mean_square, wide.mean_square, "mean of squares");
        expect_equal(narrow.copy, wide.copy, "copy");
      }
}

TEST(AdamW, RefusesWhatDoesNotFit) {
  AdamWParam p = param(8, at::kFloat, 1, false);
  EXPECT_THROW(adamw_({kBeta1, kBeta2, kEps, at::zeros({3}, at::kDouble).to(test_device())}, {p}),
               Error);
  p.mean = p.mean.to(at::kDouble);
  EXPECT_THROW(adamw_(numbers_of({}), {p}), Error);
  p = param(8, at::kFloat, 1, false);
  p.copy = p.value;
  EXPECT_THROW(adamw_(numbers_of({}), {p}), Error);
  p = param(8, at::kFloat, 1, false);
  p.mean = p.mean.to(at::kBFloat16);
  EXPECT_THROW(adamw_(numbers_of({}), {p}), Error);
}

TEST(SumOfSquares, IsThatOfFloat64) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    std::vector<at::Tensor> list;
    double want = 0;
    int i = 0;
    for (const auto size : sizes()) {
      list.push_back(normal({size}, "x" + std::to_string(i), dtype, i % 7 ? 1 : 1e18));
      ++i;
      want += list.back().to(at::kDouble).square().sum().item<double>();
    }
    const at::Tensor sum = sum_of_squares(list, test_device());
    EXPECT_EQ(sum.scalar_type(), at::kDouble);
    EXPECT_NEAR(sum.item<double>() / want, 1, 1e-13) << dtype;
    expect_equal(sum_of_squares(list, test_device()), sum, "the same bits twice");
    EXPECT_NEAR(aten_kernels().sum_of_squares({list[4], list[6]}).item<double>() /
                    sum_of_squares({list[4], list[6]}, test_device()).item<double>(),
                1, 1e-12);
    list[6][17] = NAN;
    EXPECT_TRUE(std::isnan(sum_of_squares(list, test_device()).item<double>()));
  }
  EXPECT_EQ(sum_of_squares({}, test_device()).item<double>(), 0);
}

TEST(SumOfSquares, TakesNarrowTensorsAmongWideOnes) {
  std::vector<at::Tensor> mixed, wide;
  int i = 0;
  for (const auto size : sizes()) {
    const at::Tensor x = normal({size}, "x" + std::to_string(i), at::kFloat);
    mixed.push_back(i % 2 ? x : x.to(at::kBFloat16));
    wide.push_back(mixed.back().to(at::kFloat));
    ++i;
  }
  expect_equal(sum_of_squares(mixed, test_device()), sum_of_squares(wide, test_device()), "sum");
  EXPECT_NEAR(aten_kernels().sum_of_squares({mixed[6], mixed[7]}).item<double>() /
                  sum_of_squares({mixed[6], mixed[7]}, test_device()).item<double>(),
              1, 1e-12);
}

}  // namespace
}  // namespace moesh::kernels
