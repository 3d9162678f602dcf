#include "moesh/kernels/float8.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

constexpr int kMantissaBits = 23;  // of float32: a power of two is its exponent, above them

at::Tensor pack_float8(const at::Tensor& rows_RD, std::int64_t tile) {
  constexpr std::int64_t kPiece = 1 << 24;  // numbers at once: what lies between takes more memory
  const std::int64_t R = rows_RD.size(0), D = rows_RD.size(1),
                     each = std::max<std::int64_t>(1, kPiece / D);
  const at::Tensor bytes =
      at::zeros({R, 8 * packed_float8_words(D, tile)}, rows_RD.options().dtype(at::kByte));
  for (std::int64_t first = 0; first < R; first += each) {
    const std::int64_t count = std::min(each, R - first);
    const QuantizedBox box = float8_tiles(rows_RD.narrow(0, first, count), tile);
    const at::Tensor to = bytes.narrow(0, first, count);
    to.narrow(1, 0, D).copy_(box.codes);
    to.narrow(1, D, D / tile).copy_(box.scales.view(at::kInt).bitwise_right_shift(kMantissaBits));
  }
  return bytes.view(at::kLong);
}

at::Tensor unpack_float8(const at::Tensor& packed_RW, std::int64_t width, std::int64_t tile,
                         at::ScalarType dtype) {
  const std::int64_t R = packed_RW.size(0);
  const at::Tensor bytes = packed_RW.view(at::kByte),
                   rows_RD = at::empty({R, width}, packed_RW.options().dtype(dtype));
  dequantize_into(rows_RD, {{Quantization::Format::float8, 1, tile},
                            {0, 0},
                            {R, width},
                            bytes.narrow(1, 0, width),
                            bytes.narrow(1, width, width / tile)
                                .to(at::kInt)
                                .bitwise_left_shift(kMantissaBits)
                                .view(at::kFloat)});
  return rows_RD;
}

at::Tensor float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN, std::int64_t tile) {
  return at::mm(float8_rows(rows_MK, tile), float8_weight(w_KN, tile));
}

}  // namespace

void add_float8(KernelTable& t) {
  t.pack_float8 = pack_float8, t.unpack_float8 = unpack_float8;
  t.float8_product = float8_product;
}

}  // namespace moesh::kernels::aten
