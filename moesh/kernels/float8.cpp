#include "moesh/kernels/float8.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

constexpr std::int64_t kFloat8Tile = 128;  // of own kernels
constexpr double kLeast = 1e-27;           // of a largest magnitude: zeros have a scale, too
constexpr double kMost = 448;              // the largest code

// The least power of two that is not less than x >= kLeast; NaN where x is not finite.
at::Tensor next_power_of_two(const at::Tensor& x) {
  constexpr std::int64_t kMantissa = (std::int64_t{1} << 52) - 1;
  return x.view(at::kLong)
      .add(kMantissa)
      .bitwise_and(~kMantissa)
      .view(at::kDouble)
      .masked_fill(x.isfinite().logical_not(), std::numeric_limits<double>::quiet_NaN());
}

// [.., rows, columns] in blocks.
QuantizedBox quantized(const at::Tensor& x, std::int64_t rows, std::int64_t columns) {
  const std::int64_t num_rows = x.size(-2), num_columns = x.size(-1);
  const std::int64_t row_blocks = (num_rows + rows - 1) / rows,
                     column_blocks = (num_columns + columns - 1) / columns;
  QuantizedBox box{{Quantization::Format::float8, rows, columns},
                   std::vector<std::int64_t>(static_cast<std::size_t>(x.dim()), 0),
                   x.sizes().vec(),
                   {},
                   {}};
  at::Tensor numbers = x.to(at::kFloat);
  if (x.is_meta()) {  // the memory of what follows
    const at::Tensor quotients = at::empty_like(numbers);
    auto blocks = x.sizes().vec();
    blocks[blocks.size() - 2] = row_blocks, blocks.back() = column_blocks;
    box.codes = at::empty(x.sizes(), x.options().dtype(at::kByte));
    box.scales = at::empty(blocks, x.options().dtype(at::kFloat));
    return box;
  }
  const bool is_padded = row_blocks * rows != num_rows || column_blocks * columns != num_columns;
  if (is_padded)
    numbers = at::constant_pad_nd(
        numbers, {0, column_blocks * columns - num_columns, 0, row_blocks * rows - num_rows});
  numbers = numbers.unflatten(-1, {column_blocks, columns}).unflatten(-3, {row_blocks, rows});
  const at::Tensor largest = numbers.abs().amax({-3, -1}).to(at::kDouble);
  box.scales = next_power_of_two(largest.clamp_min(kLeast).div(kMost)).to(at::kFloat);
  at::Tensor codes = numbers.div(box.scales.unsqueeze(-1).unsqueeze(-3))
                         .clamp_(-kMost, kMost)
                         .to(at::kFloat8_e4m3fn)
                         .view(at::kByte)
                         .flatten(-2)
                         .flatten(-3, -2);
  if (is_padded) codes = codes.narrow(-1, 0, num_columns).narrow(-2, 0, num_rows).contiguous();
  box.codes = codes;
  return box;
}

// Calls f with a piece along dimension 0 and where it begins: what lies between numbers and codes
// takes several times their memory.
template <class F>
void each_piece(const at::Tensor& x, std::int64_t rows, F f) {
  constexpr std::int64_t kPiece = 1 << 24;
  const std::int64_t size = x.size(0), unit = x.dim() == 2 ? rows : 1,
                     each = std::max<std::int64_t>(1, kPiece / (x.numel() / size) / unit) * unit;
  for (std::int64_t first = 0; first < size; first += each)
    f(x.narrow(0, first, std::min(each, size - first)), first);
}

// The numbers of the codes.
at::Tensor rounded(const at::Tensor& x, std::int64_t rows, std::int64_t columns) {
  const at::NoGradGuard no_grad;
  const at::Tensor out = at::empty(x.sizes(), x.options());
  each_piece(x, rows, [&](const at::Tensor& piece, std::int64_t first) {
    dequantize_into(out.narrow(0, first, piece.size(0)), quantized(piece, rows, columns));
  });
  return out;
}

// `times_R`: how often each row counts; undefined: once.
void count_codes(const at::Tensor& counts, const at::Tensor& x, std::int64_t rows,
                 std::int64_t columns, const at::Tensor& times_R) {
  each_piece(x, rows, [&](const at::Tensor& piece, std::int64_t first) {
    const at::Tensor magnitudes = quantized(piece, rows, columns).codes.bitwise_and(0x7F);
    const auto add = [&](std::int64_t place, const at::Tensor& found) {
      counts[place].add_(times_R.defined()
                             ? (found.sum(-1) * times_R.narrow(0, first, piece.size(0))).sum()
                             : found.sum());
    };
    add(1, magnitudes.eq(0).logical_and_(piece.ne(0)));
    add(2, magnitudes.eq(0x7E));
  });
}

void check_tile(const char* what, const at::Tensor& x, std::int64_t tile) {
  MOESH_CHECK(x.defined() && x.dim() >= 2 && is_kernel_dtype(x.scalar_type()) && tile >= 1,
              ErrorKind::data, what, " is ", describe(x), ", to be in float8 in tiles of ", tile,
              "; it takes [.., rows, features] of float64, float32 or bfloat16, and 1 or more");
}

}  // namespace

QuantizedBox float8_tiles(const at::Tensor& x, std::int64_t tile) {
  check_tile("x", x, tile);
  const at::NoGradGuard no_grad;
  return quantized(x, 1, tile);
}

QuantizedBox float8_blocks(const at::Tensor& w, std::int64_t tile) {
  check_tile("w", w, tile);
  const at::NoGradGuard no_grad;
  return quantized(w, tile, tile);
}

at::Tensor float8_rows(const at::Tensor& x, std::int64_t tile) {
  if (tile == 0 || x.numel() == 0) return x;
  check_tile("x", x, tile);
  return rounded(x, 1, tile);
}

at::Tensor float8_weight(const at::Tensor& w, std::int64_t tile) {
  if (tile == 0 || w.numel() == 0) return w;
  check_tile("w", w, tile);
  return rounded(w, tile, tile);
}

void count_float8_rows(const at::Tensor& counts, const at::Tensor& x, std::int64_t tile,
                       const at::Tensor& token_R) {
  check_tile("x", x, tile);
  const at::NoGradGuard no_grad;
  const at::Tensor rows = x.flatten(0, -2);
  counts[0].add_((token_R.defined() ? token_R.size(0) : rows.size(0)) * rows.size(1));
  if (rows.numel() == 0) return;
  at::Tensor times_R;
  if (token_R.defined())
    times_R = at::zeros({rows.size(0)}, counts.options())
                  .index_add_(0, token_R, at::ones({token_R.size(0)}, counts.options()));
  count_codes(counts, rows, 1, tile, times_R);
}

void count_float8_weight(const at::Tensor& counts, const at::Tensor& w, std::int64_t tile) {
  check_tile("w", w, tile);
  const at::NoGradGuard no_grad;
  counts[0].add_(w.numel());
  if (w.numel() > 0) count_codes(counts, w, tile, tile, {});
}

at::Tensor pack_float8(const at::Tensor& rows_RD, std::int64_t tile) {
  check_tile("rows_RD", rows_RD, tile);
  MOESH_CHECK(rows_RD.dim() == 2 && rows_RD.size(1) % tile == 0, ErrorKind::data, "rows_RD is ",
              describe(rows_RD), "; it takes rows [R, D] of whole tiles of ", tile);
  return call(rows_RD.device(), &KernelTable::pack_float8, rows_RD, tile);
}

at::Tensor unpack_float8(const at::Tensor& packed_RW, std::int64_t width, std::int64_t tile,
                         at::ScalarType dtype) {
  check_tensor("packed_RW", packed_RW, at::kLong, 2);
  MOESH_CHECK(packed_RW.size(1) == packed_float8_words(width, tile), ErrorKind::data,
              "packed_RW is ", describe(packed_RW), "; rows of ", width, " features have ",
              packed_float8_words(width, tile), " words");
  return call(packed_RW.device(), &KernelTable::unpack_float8, packed_RW, width, tile, dtype);
}

at::Tensor float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN, std::int64_t tile) {
  check_tile("rows_MK", rows_MK, tile);
  check_tile("w_KN", w_KN, tile);
  MOESH_CHECK(rows_MK.dim() == 2 && w_KN.dim() == 2 && rows_MK.size(1) == w_KN.size(0) &&
                  rows_MK.scalar_type() == w_KN.scalar_type() && rows_MK.device() == w_KN.device(),
              ErrorKind::data, "rows_MK is ", describe(rows_MK), " and w_KN ", describe(w_KN),
              "; the product takes [M, K] and [K, N] of one type on one device");
  const at::NoGradGuard no_grad;
  const KernelTable& own = kernels_for(rows_MK.device());
  const at::Tensor rows = rows_MK.contiguous();
  const bool is_own = own.takes_float8_product && own.takes_float8_product(rows, w_KN, tile);
  return (is_own ? own : aten_kernels()).float8_product(rows, w_KN, tile);
}

WeightCodes empty_weight_codes(const at::Tensor& w, bool has_codes, bool has_transposed) {
  check_tile("w", w, kFloat8Tile);
  auto turned = w.sizes().vec(), blocks = turned;
  std::swap(turned.back(), turned[turned.size() - 2]);
  for (const auto d : {blocks.size() - 1, blocks.size() - 2})
    blocks[d] = (blocks[d] + kFloat8Tile - 1) / kFloat8Tile;
  const auto bytes = w.options().dtype(at::kByte);
  return {has_codes ? at::empty(w.sizes(), bytes) : at::Tensor(),
          has_transposed ? at::empty(turned, bytes) : at::Tensor(),
          at::empty(blocks, w.options().dtype(at::kFloat))};
}

void write_weight_codes(const WeightCodes& to, const at::Tensor& w) {
  call(w.device(), &KernelTable::write_weight_codes, to, w);
}

at::Tensor float8_product_with(const at::Tensor& rows, const WeightCodes& w, bool transposed) {
  return call(rows.device(), &KernelTable::float8_product_with, rows, w, transposed);
}

namespace {

bool takes(at::Device device, at::ScalarType dtype, std::int64_t tile, std::int64_t N,
           std::int64_t K) {
  const KernelTable& table = kernels_for(device);
  const auto like = at::TensorOptions(at::kMeta).dtype(dtype);
  return table.takes_float8_product &&
         table.takes_float8_product(at::empty({tile, K}, like), at::empty({K, N}, like), tile) &&
         table.takes_float8_product(at::empty({tile, N}, like), at::empty({N, K}, like), tile);
}

}  // namespace

bool takes_float8_weight(const at::Tensor& w, at::ScalarType dtype, std::int64_t tile) {
  return takes(w.device(), dtype, tile, w.size(-2), w.size(-1));
}

bool has_float8_kernels(at::Device device, at::ScalarType dtype, std::int64_t tile) {
  return takes(device, dtype, tile, tile, tile);
}

}  // namespace moesh::kernels
