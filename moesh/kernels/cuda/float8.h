#pragma once
// Products in float8 (moesh/kernels/float8.h has the definition; tiles are of 128), under the rules
// of launch.h, for Hopper. Codes are bytes, e4m3; to wgmma both operands are K-major, so a weight
// comes twice, also transposed.
// T tokens, D model, F ffn, E experts, K top-k, R rows at their experts, sorted by expert

#include <cstdint>

#include "moesh/kernels/cuda/launch.h"

namespace moesh::kernels::cuda {

constexpr std::int64_t float8_tiles(std::int64_t size) {
  return (size + kFloat8Tile - 1) / kFloat8Tile;
}
/// From a line of scales to the next: TMA takes multiples of 16 bytes.
constexpr std::int64_t scale_pitch(std::int64_t num_rows) { return (num_rows + 3) / 4 * 4; }

/// The bytes of a packed row: its codes, an exponent for each tile, whole words of 8 bytes.
constexpr std::int64_t packed_row_bytes(std::int64_t width) {
  return (width + float8_tiles(width) + 7) / 8 * 8;
}

/// The bits of the scale of a tile whose largest magnitude has these bits, both float32: the least
/// power of two of at least max(largest, 1e-27) / 448, of which 448 is 1.75 times 2^8. NaN: the
/// magnitude is not finite.
constexpr std::uint32_t float8_scale(std::uint32_t largest) {
  constexpr std::uint32_t kLeast = 0x129E74D2, kInfinity = 0x7F800000, kMantissa = 0x7FFFFF;
  if (largest >= kInfinity) return 0x7FC00000;
  const std::uint32_t bits = largest < kLeast ? kLeast : largest;
  return ((bits >> 23) - 8 + ((bits & kMantissa) > 0x600000)) << 23;
}
/// The bits of 1 / scale.
constexpr std::uint32_t float8_inverse(std::uint32_t scale) {
  return scale >= 0x7F800000 ? scale : 0x7F000000 - scale;
}

/// [R, C], and scales [tiles of C, scale_pitch(R)].
struct Float8Rows {
  void* codes = nullptr;
  float* scales = nullptr;
};
/// [E, N, C], and scales [E, tiles of N, tiles of C].
struct Float8Weight {
  const void* codes = nullptr;
  const float* scales = nullptr;
  bool transposed = false;  // the codes, not the scales
};

/// out = a b': sums in float32 of `depth` numbers, of one pair of a and b; of two pairs both in
/// one; or of one a with two b, each to its own out.
struct Float8Product {
  std::int64_t num_rows;       // R
  std::int64_t width;          // of out, a multiple of 8
  std::int64_t depth;          // a multiple of 16
  std::int64_t num_experts;    // at most 512
  const std::int32_t* ends_E;  // null: all rows are of one
  Float8Rows a[2];
  Float8Weight b[2];
  void* out[2];             // bf16
  const void* bias = {};    // bf16 [E, width], for one out and one a; null: none
  const float* score = {};  // [R], of the bias; null: 1
};
Error float8_product(const Float8Product&, Stream);

/// Codes of x at rows[inverse[t, k]], and x itself where rows_RD is given. A null inverse: rows
/// are where they are, and K is 1. `width` is a multiple of 8.
Error expand8(const void* x_TD, const std::int32_t* inverse_TK, void* rows_RD, Float8Rows rows,
              std::int64_t num_tokens, std::int64_t top_k, std::int64_t num_rows,
              std::int64_t width, Stream);

/// Rows [R, D] of whole tiles to packed_row_bytes(D) each, and the numbers that these stand for.
Error pack8(const void* rows_RD, void* packed, std::int64_t num_rows, std::int64_t width, Stream);
Error unpack8(const void* packed, void* rows_RD, std::int64_t num_rows, std::int64_t width, Stream);

/// Codes of a weight [E, N, C] in bf16, or in float32 and rounded to bf16 first, and of its
/// transposed; null: not wanted. scales [E, tiles of N,
/// tiles of C] are written. N and C are multiples of 8.
Error float8_weight(const void* w, bool is_float32, void* codes, void* transposed, float* scales,
                    std::int64_t num_experts, std::int64_t height, std::int64_t width, Stream);

/// The hidden state with its score, of gate and up, as `up` has it.
Error act8(const GroupedExperts&, const void* gate_RF, const void* up_RF, Float8Rows act, Stream);
/// What follows the product of dy and W2, d_hidden: d_gate, d_up and act over gate, up and
/// d_hidden, and d_score_terms, all as `dh` has them; and codes of the first two. Not of biases
/// with a score before the expert.
Error dh8(const GroupedExperts&, void* d_hidden_RF, void* gate_RF, void* up_RF, Float8Rows d_gate,
          Float8Rows d_up, float* d_score_terms, Stream);

}  // namespace moesh::kernels::cuda
