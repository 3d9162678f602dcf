#include "moesh/kernels/quantized.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/kernels/quantized_check.h"

namespace moesh::kernels {
namespace {

using Kind = Quantization::Format;

class Quantizations : public testing::TestWithParam<Kind> {
 public:
  static Quantization small(Kind kind) {
    return kind == Kind::mxfp4 ? Quantization::mxfp4() : Quantization{kind, 4, 24};
  }
};
INSTANTIATE_TEST_SUITE_P(All, Quantizations, testing::Values(Kind::float8, Kind::mxfp4),
                         [](const auto& info) {
                           return info.param == Kind::float8 ? "float8" : "mxfp4";
                         });

TEST_P(Quantizations, StandForTheNumbersOfTheFormula) {
  EXPECT_EQ(quantized_check::complaint(GetParam()), "");
}

// A box is quantized as it would be in the whole tensor, and is near to what it was.
TEST_P(Quantizations, RoundABoxLikeTheWhole) {
  at::manual_seed(3);
  const Quantization how = small(GetParam());
  const double deviation = 0.02;
  const std::vector<std::int64_t> shape{3, 9, 75};
  const at::Tensor values = at::randn(shape, at::kDouble).mul(deviation);
  const at::Tensor whole =
      dequantize(quantize(how, values, {0, 0, 0}, shape, deviation), at::kFloat);
  const double error = (whole - values).norm().item<double>() / values.norm().item<double>();
  EXPECT_LT(error, GetParam() == Kind::float8 ? 0.04 : 0.2);
  EXPECT_GT(error, 0.005);  // it was rounded
  for (const auto& [row, rows] : {std::pair{0, 9}, {3, 4}, {8, 1}})
    for (const auto& [column, columns] : {std::pair{0, 75}, {1, 30}, {23, 2}, {33, 42}}) {
      const auto box_of = [&, r = row, n = rows, c = column, m = columns](const at::Tensor& t) {
        return t.narrow(0, 1, 2).narrow(1, r, n).narrow(2, c, m).contiguous();
      };
      const at::Tensor box =
          dequantize(quantize(how, box_of(values), {1, row, column}, shape, deviation), at::kFloat);
      EXPECT_TRUE(box.equal(box_of(whole))) << row << " " << column;
    }
}

// More numbers than are made at once, in pieces that begin within a block.
TEST(Quantized, IsMadeInPieces) {
  const std::int64_t rows = 4200, columns = 4100;
  const at::Tensor values = at::randn({rows, columns});
  const auto box = quantize({}, values, {5, 0}, {rows + 5, columns}, 1);
  const at::Tensor numbers = dequantize(box, at::kBFloat16);
  for (const std::int64_t row : {0, 122, 123, 4090, 4091, 4092, 4199}) {
    const auto one = quantize({}, values.narrow(0, row, 1), {5 + row, 0}, {rows + 5, columns}, 1);
    EXPECT_TRUE(dequantize(one, at::kBFloat16).equal(numbers.narrow(0, row, 1))) << row;
  }
}

TEST_P(Quantizations, TakeAByteOrHalfOfOneForEachNumber) {
  const bool is_mxfp4 = GetParam() == Kind::mxfp4;
  const Quantization how = is_mxfp4 ? Quantization::mxfp4() : Quantization{};
  const auto box = quantize(how, at::empty({4, 256, 512}, at::kMeta), {0, 0, 0}, {4, 256, 512}, 1);
  EXPECT_EQ(box.num_bytes(),
            is_mxfp4 ? 4 * 256 * (512 / 2 + 512 / 32) : 4 * (256 * 512 + 4 * 2 * 4));
}

}  // namespace
}  // namespace moesh::kernels
