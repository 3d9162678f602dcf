#include "moesh/kernels/float8.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/kernels/table.h"
#include "tests/kernels/float8_check.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

TEST(Float8, CodesAndScalesFollowTheDefinition) {
  const Poison poison;
  EXPECT_EQ(float8_check::codes_complaint(), "");
}

TEST(Float8, CountsFollowTheDefinition) { EXPECT_EQ(float8_check::counts_complaint(), ""); }

TEST(Float8, PackedRowsFollowTheDefinition) {
  const Poison poison;
  EXPECT_EQ(float8_check::packed_complaint(), "");
}

TEST(Float8, ProductsFollowTheDefinition) {
  const Poison poison;
  for (const auto dtype : kTypes)
    EXPECT_EQ(float8_check::product_complaint(dtype), "") << c10::toString(dtype);
}

TEST(Float8, ExpertsFollowTheDefinition) {
  const Poison poison;
  for (const auto dtype : kTypes)
    EXPECT_EQ(float8_check::experts_complaint(dtype), "") << c10::toString(dtype);
}

// What was rounded to float8 stays as it is when it is rounded again. (The codes of a tile may be
// others: 225 becomes 224, whose scale is half as large.)
TEST(Float8, NumbersOfCodesAreTheirOwn) {
  for (const auto dtype : kTypes) {
    const at::Tensor x = normal({9, 40}, "x", dtype), once = float8_rows(x, 16);
    expect_equal(float8_rows(once, 16), once, "rows");
    const at::Tensor w = float8_weight(x, 16);
    expect_equal(float8_weight(w, 16), w, "weight");
    expect_equal(float8_weight(w.t(), 16), w.t(), "transposed weight");
    expect_close(once, x, 0.04, "rounded to four bits");
    expect_equal(float8_rows(x, 0), x, "not in float8");
  }
}

// Tiles that a rank has are those of the whole, also without rows.
TEST(Float8, TilesOfPartsAreThoseOfTheWhole) {
  const at::Tensor x = normal({12, 32}, "x", at::kFloat);
  const at::Tensor rows = float8_rows(x, 8), weight = float8_weight(x, 4);
  for (const std::int64_t part : {0, 1}) {
    expect_equal(float8_rows(x.narrow(1, 16 * part, 16), 8), rows.narrow(1, 16 * part, 16), "rows");
    expect_equal(float8_weight(x.narrow(0, 4 * part, 4), 4), weight.narrow(0, 4 * part, 4), "rows");
    expect_equal(float8_weight(x.narrow(1, 16 * part, 16), 4), weight.narrow(1, 16 * part, 16),
                 "columns");
  }
  EXPECT_EQ(float8_rows(at::empty({0, 8}), 4).sizes(), (at::IntArrayRef{0, 8}));
  EXPECT_EQ(float8_product(at::empty({0, 8}), at::ones({8, 3}), 4).sizes(),
            (at::IntArrayRef{0, 3}));
}

// Large tensors are rounded piece by piece.
TEST(Float8, PiecesAreThoseOfTheWhole) {
  const at::Tensor x = normal({300, 200}, "x", at::kBFloat16).repeat({20, 15});  // 18 million
  expect_equal(float8_rows(x, 128), dequantize(float8_tiles(x, 128), at::kBFloat16), "rows");
  expect_equal(float8_weight(x, 128), dequantize(float8_blocks(x, 128), at::kBFloat16), "weight");
  expect_equal(float8_weight(x.t(), 128), float8_weight(x, 128).t(), "transposed");
  const at::Tensor rows = x.narrow(1, 0, 2944);  // whole tiles
  expect_equal(unpack_float8(pack_float8(rows, 128), 2944, 128, at::kBFloat16),
               float8_rows(rows, 128), "packed");
}

TEST(Float8, ShapesAreKnownWithoutValues) {
  const auto meta = at::TensorOptions(at::kMeta).dtype(at::kBFloat16);
  const at::Tensor y = float8_product(at::empty({5, 24}, meta), at::empty({24, 7}, meta), 16);
  EXPECT_TRUE(y.is_meta());
  EXPECT_EQ(y.sizes(), (at::IntArrayRef{5, 7}));
  EXPECT_EQ(float8_tiles(at::empty({5, 24}, meta), 16).scales.sizes(), (at::IntArrayRef{5, 2}));
  const at::Tensor packed = pack_float8(at::empty({5, 24}, meta), 8);
  EXPECT_EQ(packed.sizes(), (at::IntArrayRef{5, 4}));
  EXPECT_EQ(unpack_float8(packed, 24, 8, at::kBFloat16).sizes(), (at::IntArrayRef{5, 24}));
}

TEST(Float8, SaysWhatItCannotTake) {
  EXPECT_THROW(float8_tiles(at::ones({8}), 4), Error);
  EXPECT_THROW(pack_float8(at::ones({2, 6}), 4), Error);
  EXPECT_THROW(pack_float8(at::ones({2, 2, 8}), 4), Error);
  EXPECT_THROW(unpack_float8(at::zeros({2, 3}, at::kLong), 8, 4, at::kFloat), Error);
  EXPECT_THROW(float8_tiles(at::ones({8, 8}, at::kLong), 4), Error);
  EXPECT_THROW(float8_product(at::ones({2, 8}), at::ones({7, 3}), 4), Error);
  EXPECT_THROW(float8_product(at::ones({2, 8}), at::ones({8, 3}, at::kDouble), 4), Error);
}

}  // namespace
}  // namespace moesh::kernels
