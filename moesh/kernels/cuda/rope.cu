// Rotary embedding of heads and its adjoint: one pass, in which the features that stay are copied,
// unless the result is the memory of x.

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct RopeParams {
  const bf16* x;
  bf16* y;
  const float *cos, *sin;
  const int64_t* positions;  // null: token l of a sequence has line l of the table
  int64_t strides[3], y_strides[3];
  unsigned size;    // pieces in all
  unsigned pieces;  // of a head: those that turn, then those that stay
  unsigned length, num_heads;
  int num_kept;  // features that stay
  int num_turns;
  bool leading;
  float sign;  // -1: the adjoint
};

__device__ __forceinline__ void load_floats(const float* from, float (&v)[8]) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(from)),
               b = __ldg(reinterpret_cast<const float4*>(from) + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

/// A thread copies 8 features, or turns 8 pairs. Pairs lie side by side, or `num_turns` apart.
template <bool kPairsIn, bool kPairsOut>
__global__ void __launch_bounds__(kThreads) rope_kernel(const RopeParams p) {
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.size) return;
  const unsigned head_at = at / p.pieces, token = head_at / p.num_heads,
                 head = head_at - token * p.num_heads, sequence = token / p.length,
                 position = token - sequence * p.length;
  const int piece = static_cast<int>(at - head_at * p.pieces);
  const bf16* x = p.x + sequence * p.strides[0] + position * p.strides[1] + head * p.strides[2];
  bf16* y = p.y + sequence * p.y_strides[0] + position * p.y_strides[1] + head * p.y_strides[2];
  const int turn = piece * 8, first_turn = p.leading ? 0 : p.num_kept;
  if (turn >= p.num_turns) {
    const int kept = turn - p.num_turns + (p.leading ? 2 * p.num_turns : 0);
    store16(y + kept, load16(x + kept));
    return;
  }
  x += first_turn, y += first_turn;
  float a[8], b[8], cos[8], sin[8];
  {
    float u[8], v[8];
    unpack(load16(x + (kPairsIn ? 2 * turn : turn)), u);
    unpack(load16(x + (kPairsIn ? 2 * turn + 8 : turn + p.num_turns)), v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] = !kPairsIn ? u[i] : i < 4 ? u[2 * i % 8] : v[2 * i % 8];
      b[i] = !kPairsIn ? v[i] : i < 4 ? u[2 * i % 8 + 1] : v[2 * i % 8 + 1];
    }
  }
  const int64_t angle =
      (p.positions ? __ldg(p.positions + token) : static_cast<int64_t>(position)) * p.num_turns +
      turn;
  load_floats(p.cos + angle, cos), load_floats(p.sin + angle, sin);
  float c[8], d[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float s = p.sign * sin[i];
    c[i] = a[i] * cos[i] - b[i] * s;
    d[i] = b[i] * cos[i] + a[i] * s;
  }
  float u[8], v[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    u[i] = !kPairsOut ? c[i] : i % 2 == 0 ? c[i / 2] : d[i / 2];
    v[i] = !kPairsOut ? d[i] : i % 2 == 0 ? c[4 + i / 2] : d[4 + i / 2];
  }
  __syncwarp();  // where y is x, others have read what this thread writes: a head is in one warp
  store16(y + (kPairsOut ? 2 * turn : turn), packed(u));
  store16(y + (kPairsOut ? 2 * turn + 8 : turn + p.num_turns), packed(v));
}

}  // namespace

Error rope(const Rope& r, const void* x, void* y, Stream stream) {
  if (r.num_kept % 8 != 0 || r.num_turns < 8 || r.num_turns % 8 != 0 || r.strides[0] % 8 != 0 ||
      r.strides[1] % 8 != 0 || r.strides[2] % 8 != 0)
    return "a rotation takes multiples of 8 features that stay and of 8 frequencies";
  const bool is_in_place = x == y;
  const std::int64_t turning = r.num_turns / 8, width = r.num_kept + 2 * r.num_turns;
  if (is_in_place && (turning > 32 || (turning & (turning - 1)) != 0))
    return "a rotation in place takes 8 times a power of two frequencies, at most 256";
  const std::int64_t pieces = turning + (is_in_place ? 0 : r.num_kept / 8);
  if (r.batch * r.length * r.num_heads * pieces >> 31)
    return "a rotation takes fewer than 2^34 features";
  RopeParams p{.x = static_cast<const bf16*>(x),
               .y = static_cast<bf16*>(y),
               .cos = r.cos,
               .sin = r.sin,
               .positions = r.positions,
               .strides = {r.strides[0], r.strides[1], r.strides[2]},
               .y_strides = {r.length * r.num_heads * width, r.num_heads * width, width},
               .size = static_cast<unsigned>(r.batch * r.length * r.num_heads * pieces),
               .pieces = static_cast<unsigned>(pieces),
               .length = static_cast<unsigned>(r.length),
               .num_heads = static_cast<unsigned>(r.num_heads),
               .num_kept = static_cast<int>(r.num_kept),
               .num_turns = static_cast<int>(r.num_turns),
               .leading = r.leading,
               .sign = r.adjoint ? -1.f : 1.f};
  if (p.size == 0) return nullptr;
  if (is_in_place)
    for (int i = 0; i < 3; ++i) p.y_strides[i] = p.strides[i];
  const auto kernel = !r.interleaved ? rope_kernel<false, false>
                      : r.adjoint    ? rope_kernel<false, true>
                                     : rope_kernel<true, false>;
  return launch(stream, kernel, blocks_for(p.size, kThreads), kThreads, p);
}

}  // namespace moesh::kernels::cuda
