#pragma once
// Products in blockwise float8 (E4M3), for training. The definition:
//   rows (activations, gradients of outputs): tiles of 1 x T, T features of one row
//   weights [.., N, K]: blocks of T x T; the last tile or block of a dimension may be short
//   s = max(largest magnitude, 1e-27) / 448, rounded up to a power of two
//   q = x / s, as the nearest code (of two, the even one); both see x as float32
//   Y[m, n] = sum over kb of sA[m, kb] sB[n / T, kb] (sum over k in kb of qA[m, k] qB[n, k])
// A block of a weight has the same scale both ways, so the transposed weight has the same codes.
// Scales are powers of two, so s q is a number of bfloat16, and a plain product of these numbers is
// Y, up to the order of its sums. That is how LibTorch's ops compute it, on every device; GPUs of
// compute capability 9.0 have kernels of their own (cuda/float8.h).

#include <ATen/core/Tensor.h>

#include "moesh/kernels/quantized.h"

namespace moesh::kernels {

/// What of a model is in float8: T of the products of experts and of dense projections, and of rows
/// on their way; 0: they are in the type of the run.
struct Float8 {
  std::int64_t experts = 0, dense = 0;
  std::int64_t rows = 0;  // of rows that go to experts, and of gradients that do
  bool has_products() const { return experts > 0 || dense > 0; }
  bool any() const { return has_products() || rows > 0; }
};

/// Codes and scales of rows [.., C], and of weights [.., N, K].
QuantizedBox float8_tiles(const at::Tensor& x, std::int64_t tile);
QuantizedBox float8_blocks(const at::Tensor& w, std::int64_t tile);

/// The numbers s q, in the type of what is rounded. tile 0: the same tensor.
at::Tensor float8_rows(const at::Tensor& x, std::int64_t tile);
at::Tensor float8_weight(const at::Tensor& w, std::int64_t tile);

/// Adds to `counts`, int64 [3]: how many numbers are rounded; how many of them are not 0 and get
/// the code 0; and how many get a code of the largest magnitude, 448. Nothing saturates, as a scale
/// is at least the largest magnitude / 448. Row r is x[token_R[r]] where token_R is given.
void count_float8_rows(const at::Tensor& counts, const at::Tensor& x, std::int64_t tile,
                       const at::Tensor& token_R = {});
void count_float8_weight(const at::Tensor& counts, const at::Tensor& w, std::int64_t tile);
/// The counts of a layer [3, 3]: of activations, gradients and weights. Undefined: nobody counts.
struct Float8Counts {
  at::Tensor counts;
  /// Whether this rank counts the rows that several ranks round.
  bool has_inputs = true, has_gradients = true;

  bool defined() const { return counts.defined(); }
  at::Tensor activations() const { return counts[0]; }
  at::Tensor gradients() const { return counts[1]; }
  at::Tensor weights() const { return counts[2]; }
};

/// Rows [R, D] of whole tiles as they travel, in words of 8 bytes [R, W]: the codes of a row, then
/// the exponents of its scales, a byte each as float32 has them, and zeros up to a whole word.
at::Tensor pack_float8(const at::Tensor& rows_RD, std::int64_t tile);
/// The numbers s q of what was packed.
at::Tensor unpack_float8(const at::Tensor& packed_RW, std::int64_t width, std::int64_t tile,
                         at::ScalarType dtype);
constexpr std::int64_t packed_float8_words(std::int64_t width, std::int64_t tile) {
  return (width + width / tile + 7) / 8;
}

/// Y = rows w, of [M, K] and [K, N], in the type of the rows; w may be a transposed view.
at::Tensor float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN, std::int64_t tile);

/// A weight [.., N, K] as own kernels read it, kept from one product to the next: its codes, those
/// of its transposed, and the scales of its blocks.
struct WeightCodes {
  at::Tensor codes, transposed, scales;
  bool defined() const { return codes.defined(); }
};
/// Their memory, for tiles of 128, and the codes of w in bfloat16.
WeightCodes empty_weight_codes(const at::Tensor& w, bool has_codes = true,
                               bool has_transposed = true);
void write_weight_codes(const WeightCodes& to, const at::Tensor& w);
/// Y = rows w', or rows w, of rows [M, K] or [M, N].
at::Tensor float8_product_with(const at::Tensor& rows, const WeightCodes& w, bool transposed);

/// Whether own kernels multiply with a weight like w [.., N, K], in this type, both ways.
bool takes_float8_weight(const at::Tensor& w, at::ScalarType dtype, std::int64_t tile);
/// The same of weights of whole tiles; else LibTorch's ops do, which is slower than no float8.
bool has_float8_kernels(at::Device device, at::ScalarType dtype, std::int64_t tile);

}  // namespace moesh::kernels
