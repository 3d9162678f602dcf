#include "tests/kernels/quantized_check.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>

#include "moesh/base/error.h"

namespace moesh::quantized_check {
namespace {

using kernels::Quantization;

// Sign, exponent of four bits, three of the mantissa.
double e4m3(unsigned bits) {
  const unsigned exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double size = exponent == 0
                          ? std::ldexp(mantissa / 8.0, -6)
                          : std::ldexp(1 + mantissa / 8.0, static_cast<int>(exponent) - 7);
  return bits & 128 ? -size : size;
}

double e2m1(unsigned bits) {
  constexpr std::array<double, 8> kSizes{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return bits & 8 ? -kSizes[bits & 7] : kSizes[bits & 7];
}

constexpr std::int64_t E = 3, R = 7, C = 70;

// The number at (e, row, column) of the whole tensor.
double number_at(const Quantization& how, const at::Tensor& codes, const at::Tensor& scales,
                 std::int64_t e, std::int64_t row, std::int64_t column) {
  if (how.kind == Quantization::Format::float8)
    return e4m3(codes[e][row][column].item<std::uint8_t>()) *
           scales[e][row / how.rows][column / how.columns].item<double>();
  const unsigned byte = codes[e][row][column / 2].item<std::uint8_t>();
  const int exponent = scales[e][row][column / 32].item<std::uint8_t>();
  return std::ldexp(e2m1(column % 2 == 0 ? byte & 15 : byte >> 4), exponent - 127);
}

}  // namespace

std::string complaint(Quantization::Format kind) {
  at::manual_seed(7);
  const bool is_mxfp4 = kind == Quantization::Format::mxfp4;
  const Quantization how = is_mxfp4 ? Quantization::mxfp4() : Quantization{kind, 4, 24};
  at::Tensor codes = at::randint(256, {E, R, is_mxfp4 ? C / 2 : C}, at::kByte);
  if (!is_mxfp4) codes.masked_fill_(codes.bitwise_and(127).eq(127), 3);  // no number
  // Also the smallest exponents, of numbers that float32 has no full precision for.
  const at::Tensor scales =
      is_mxfp4 ? at::randint(0, 249, {E, R, 3}, at::kByte) : at::rand({E, 2, 3}).add(0.25);
  for (const auto& [row, rows] : {std::pair{0, 7}, {3, 2}, {4, 3}, {6, 1}, {2, 0}})
    for (const auto& [column, columns] :
         {std::pair{0, 70}, {1, 31}, {24, 24}, {31, 2}, {33, 36}, {69, 1}})
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
        kernels::QuantizedBox box{how, {1, row, column}, {2, rows, columns}, {}, {}};
        // What the box has a part of.
        const auto cut = [&](const at::Tensor& t, std::int64_t r, std::int64_t c) {
          const std::int64_t row_end = rows == 0 ? row / r : (row + rows + r - 1) / r,
                             column_end = (column + columns + c - 1) / c;
          return t.narrow(0, 1, 2)
              .narrow(1, row / r, row_end - row / r)
              .narrow(2, column / c, column_end - column / c)
              .contiguous();
        };
        box.codes = cut(codes, 1, is_mxfp4 ? 2 : 1);
        box.scales = cut(scales, how.rows, how.columns);
        const at::Tensor found = kernels::dequantize(box, dtype);
        for (std::int64_t e = 0; e < 2; ++e)
          for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t j = 0; j < columns; ++j) {
              const at::Tensor wanted =
                  at::full(
                      {},
                      static_cast<float>(number_at(how, codes, scales, 1 + e, row + i, column + j)),
                      at::kFloat)
                      .to(dtype);
              if (!found[e][i][j].equal(wanted))
                return detail::concat(how.name(), ": number (", 1 + e, ", ", row + i, ", ",
                                      column + j, ") is ", found[e][i][j].item<double>(),
                                      ", and not ", wanted.item<double>());
            }
      }
  return "";
}

}  // namespace moesh::quantized_check
