#pragma once
// Elementwise work after the GEMMs. Warps take rows of results from shared memory, four at a
// time: eight columns of a row per lane, which are read and written as 16 bytes.
//   swiglu          h = silu(g) u
//   clamped_swiglu  g = min(g, 7), u = clamp(u, -7, 7), h = (u + 1) g sigmoid(1.702 g)
//   g = gate + b1, u = up + b3, act = s h, y = act W2' + s b2; score before: g = s gate + b1 ...
// gate and up are rounded to bf16 before the activation sees them, here and in backward: the
// gradient is that of the function computed.
// D model, F ffn, E experts, R rows at their experts

#include "moesh/kernels/cuda/ptx.h"
#include "moesh/kernels/cuda/tiles.h"

namespace moesh::kernels::cuda {

using ptx::bf16;

struct Elementwise {
  const float* score_R;  // null: none
  bool before;           // the score multiplies the input of the expert, not its output
  bool clamped;          // the activation
  bool trains_biases;    // dh: bias_gradients comes after it
  const bf16* bias[2];   // up, dh: b1, b3 [E, F]; down: b2 [E, D]; null: none
  bf16* gate_RF;         // dh: d_gate is written over it
  bf16* up_RF;           // likewise
  bf16* act_RF;
  bf16* rows_RD;     // down, dx
  float* d_score;    // dh: [tiles of 256 columns, R], terms of d(score)
  int64_t num_rows;  // R
};

/// A warp group's part of a tile of results.
struct Slab {
  int expert, first_row, num_rows, first_column, width, column_tile;
};

inline constexpr int kFinishers = 3;             // warps that divide a slab, four rows at a time
inline constexpr int kRowStep = 4 * kFinishers;  // from a lane's row to its next
/// The first row of a lane. A slab has 16 fours: the second one begins with another finisher, so
/// that all have as much to do.
__device__ __forceinline__ int first_row_of(int slab, int finisher, int lane) {
  return (finisher + 2 * slab) % kFinishers * 4 + lane / 8;
}

inline constexpr int kResultBlock = 2 * kSlab * 128;  // from 64 columns of a slab to the next 64

__device__ __forceinline__ void unpack(uint4 packed, float (&v)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[2 * i] = ptx::low_half(words[i]), v[2 * i + 1] = ptx::high_half(words[i]);
}
__device__ __forceinline__ uint4 packed(const float (&v)[8]) {
  return {ptx::pack(v[0], v[1]), ptx::pack(v[2], v[3]), ptx::pack(v[4], v[5]),
          ptx::pack(v[6], v[7])};
}
__device__ __forceinline__ uint4 load16(const bf16* from) {
  return *reinterpret_cast<const uint4*>(from);
}
__device__ __forceinline__ void store16(bf16* to, uint4 v) { *reinterpret_cast<uint4*>(to) = v; }

/// The scores of a slab, spread over a warp.
struct Scores {
  float low = 1.f, high = 1.f;  // of rows lane and lane + 32

  __device__ Scores(const float* score_R, const Slab& s, int lane) {
    if (!score_R) return;
    if (lane < s.num_rows) low = score_R[s.first_row + lane];
    if (lane + 32 < s.num_rows) high = score_R[s.first_row + lane + 32];
  }
  __device__ float of(int row) const {
    const float a = __shfl_sync(~0u, low, row % 32), b = __shfl_sync(~0u, high, row % 32);
    return row < 32 ? a : b;
  }
};

struct ActivationResult {
  float h, dh_dg, dh_du;
};
__device__ __forceinline__ ActivationResult swiglu(float g, float u) {
  const float sigma = ptx::sigmoid(g), silu = g * sigma;
  return {silu * u, u * sigma * (1.f + g - silu), silu};
}
__device__ __forceinline__ ActivationResult clamped_swiglu(float g, float u) {
  constexpr float kLimit = 7.f, kAlpha = 1.702f;
  const float gc = g > kLimit ? kLimit : g;  // not fminf: a NaN stays one
  const float uc = (u > kLimit ? kLimit : u < -kLimit ? -kLimit : u) + 1.f;
  const float sigma = ptx::sigmoid(kAlpha * gc), swish = gc * sigma;
  return {swish * uc, g > kLimit ? 0.f : (sigma + kAlpha * swish * (1.f - sigma)) * uc,
          fabsf(u) > kLimit ? 0.f : swish};
}

/// The biases of eight columns, packed. kPlain: SwiGLU without biases, no score before it; all else
/// is decided at run time.
template <bool kPlain>
struct ColumnBiases {
  __device__ __forceinline__ void load(const Elementwise&, const Slab&, int) {}
};
template <>
struct ColumnBiases<false> {
  uint4 b1, b3;

  __device__ __forceinline__ void load(const Elementwise& e, const Slab& s, int column) {
    const int64_t at = static_cast<int64_t>(s.expert) * s.width + column;
    b1 = e.bias[0] ? load16(e.bias[0] + at) : uint4{};
    b3 = e.bias[1] ? load16(e.bias[1] + at) : uint4{};
  }
};

/// One row's gate and up on their way to the hidden state.
template <bool kPlain>
struct RowActivation {
  float before = 1.f, after = 1.f, kept = 1.f;  // kept: what dh multiplies its results by
  float b1[8], b3[8];

  __device__ __forceinline__ RowActivation(const Elementwise& e, const ColumnBiases<kPlain>& biases,
                                           float score) {
    if constexpr (kPlain) {
      after = score;
    } else {
      (e.before ? before : after) = score;
      kept = e.trains_biases ? 1.f : before;
      unpack(biases.b1, b1), unpack(biases.b3, b3);
    }
  }
  template <bool kClamped>
  __device__ __forceinline__ ActivationResult at(int i, float gate, float up) const {
    if constexpr (kPlain) return swiglu(gate, up);
    const float g = before * gate + b1[i], u = before * up + b3[i];
    return kClamped ? clamped_swiglu(g, u) : swiglu(g, u);
  }
};

/// Calls f.operator()<whether the activation is the clamped one>().
template <bool kPlain, class Function>
__device__ __forceinline__ void with_activation(const Elementwise& e, const Function& f) {
  if (!kPlain && e.clamped)
    f.template operator()<true>();
  else
    f.template operator()<false>();
}

/// up: act from gate (blocks 0, 1 of the results) and up (2, 3), and these where TMA does not store
/// them.
template <bool kPlain>
__device__ __forceinline__ void finish_up(const Elementwise& e, const Slab& s, uint32_t results,
                                          int lane, int first_row, bool store_inputs) {
  const Scores scores(e.score_R, s, lane);
  const int chunk = lane % 8;
#pragma unroll 1
  for (int block = 0; block < 2; ++block) {
    const int column = s.first_column + block * 64 + chunk * 8;
    ColumnBiases<kPlain> biases;
    biases.load(e, s, min(column, s.width - 8));
#pragma unroll 2
    for (int row = first_row; row < first_row + kSlab; row += kRowStep) {
      const float score = scores.of(row);
      if (row >= s.num_rows || column >= s.width) continue;
      const int64_t at = static_cast<int64_t>(s.first_row + row) * s.width + column;
      const uint32_t from = results + block * kResultBlock + swizzled(row, chunk);
      const uint4 gates = ptx::load_shared16(from);
      const uint4 ups = ptx::load_shared16(from + 2 * kResultBlock);
      if (store_inputs) store16(e.gate_RF + at, gates), store16(e.up_RF + at, ups);
      const RowActivation<kPlain> activation(e, biases, score);
      float gate[8], up[8], act[8];
      unpack(gates, gate), unpack(ups, up);
      with_activation<kPlain>(e, [&]<bool kClamped>() {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          act[i] = activation.after * activation.template at<kClamped>(i, gate[i], up[i]).h;
      });
      store16(e.act_RF + at, packed(act));
    }
  }
}

/// dh: the results are P = dy W2, the gradient of h but for the score. With dA = s P:
/// d_gate = dA dh/dg and d_up = dA dh/du over gate and up, act = s h once more, d_score = <h, P>;
/// or, with the score before, <dg, gate> + <du, up>, and these times s, but for biases that are
/// trained: their gradients are sums of dg and du, and bias_gradients multiplies by s then.
/// This is the longest of the finishes, and must be done before the next tile is. So gate and up
/// are loaded one row ahead. Plain: into registers, as shared memory is busy with the
/// multiplications (5 % of dh at D = 2048). Else the biases need those, and each lane has its own
/// shared memory.
template <bool kPlain>
class FinishDh {
 public:
  /// A warp's gate and up: a lane's columns of one row, in four blocks of 64 columns.
  static constexpr int kBytes = 4 * 2 * 32 * 16;

  /// A slab of up to 128 rows: the whole height of a tile. `inputs` are kBytes of shared memory.
  __device__ __forceinline__ FinishDh(const Elementwise& e, const Slab& s, int lane, int first_row,
                                      uint32_t inputs)
      : e_(e),
        s_(s),
        chunk_(lane % 8),
        row_(first_row),
        lane_row_(lane / 8),
        columns_left_(s.width - s.first_column - chunk_ * 8),
        column_(min(s.first_column + chunk_ * 8, s.width - 8)),
        inputs_(inputs + lane * 16) {
    const int64_t at = start_of(row_);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      load(block, at, true);
      biases_[block].load(e, s, min(column_ + block * 64, s.width - 8));
    }
    next_score_ = score_of(row_);
  }

  /// Rows up to `end`.
  __device__ __forceinline__ void operator()(uint32_t results, int end) {
#pragma unroll 1
    for (; row_ < end; row_ += kRowStep) {
      const int64_t at = start_of(row_), next = start_of(row_ + kRowStep);
      const bool exists = row_ < s_.num_rows, more = row_ - lane_row_ + kRowStep < s_.num_rows;
      const float score = next_score_;
      next_score_ = score_of(row_ + kRowStep);
      float dot = 0.f;
#pragma unroll
      for (int block = 0; block < 4; ++block)
        dot += finish(block, at, next, exists && block * 64 < columns_left_, more, score, results);
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2)
        dot += __shfl_xor_sync(~0u, dot, distance);
      if (e_.d_score && chunk_ == 0 && exists)
        e_.d_score[s_.column_tile * e_.num_rows + s_.first_row + row_] = dot;
    }
  }

 private:
  /// This lane's columns of a row; of the last one for those past it.
  __device__ __forceinline__ int64_t start_of(int row) const {
    return static_cast<int64_t>(s_.first_row + min(row, s_.num_rows - 1)) * s_.width + column_;
  }
  __device__ __forceinline__ float score_of(int row) const {
    return e_.score_R ? e_.score_R[s_.first_row + min(row, s_.num_rows - 1)] : 1.f;
  }
  /// Into registers even in vain, so that these stay the same ones. Else always one group of
  /// copies.
  __device__ __forceinline__ void load(int block, int64_t at, bool wanted) {
    const bool inside = block * 64 < columns_left_;
    if constexpr (kPlain) {
      at += inside ? block * 64 : 0;
      ptx::load_in_place(gates_[block], e_.gate_RF + at);
      ptx::load_in_place(ups_[block], e_.up_RF + at);
    } else {
      if (wanted && inside) {
        ptx::copy_async16(inputs_ + block * 1024, e_.gate_RF + at + block * 64);
        ptx::copy_async16(inputs_ + block * 1024 + 512, e_.up_RF + at + block * 64);
      }
      ptx::copy_async_commit();
    }
  }
  /// 8 columns of a row; returns their part of d_score.
  __device__ __forceinline__ float finish(int block, int64_t at, int64_t next, bool exists,
                                          bool more, float score, uint32_t results) {
    float p[8], gate[8], up[8], act[8];
    if constexpr (!kPlain) {
      ptx::copy_async_wait<3>();  // the other blocks may be on their way
      gates_[block] = ptx::load_shared16(inputs_ + block * 1024);
      ups_[block] = ptx::load_shared16(inputs_ + block * 1024 + 512);
    }
    unpack(ptx::load_shared16(results + block * kResultBlock + swizzled(row_, chunk_)), p);
    unpack(gates_[block], gate), unpack(ups_[block], up);
    load(block, next, more);
    const RowActivation<kPlain> activation(e_, biases_[block], score);
    float dot = 0.f;
    with_activation<kPlain>(e_, [&]<bool kClamped>() {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const ActivationResult v = activation.template at<kClamped>(i, gate[i], up[i]);
        const float d = activation.after * p[i], dg = d * v.dh_dg, du = d * v.dh_du;
        act[i] = activation.after * v.h;
        if constexpr (kPlain) {
          dot += v.h * p[i];
          gate[i] = dg, up[i] = du;
        } else {
          dot += e_.before ? dg * gate[i] + du * up[i] : v.h * p[i];
          gate[i] = activation.kept * dg, up[i] = activation.kept * du;
        }
      }
    });
    if (!exists) return 0.f;
    at += block * 64;
    store16(e_.gate_RF + at, packed(gate));
    store16(e_.up_RF + at, packed(up));
    store16(e_.act_RF + at, packed(act));
    return dot;
  }

  const Elementwise& e_;
  const Slab& s_;
  const int chunk_;
  int row_;
  const int lane_row_, columns_left_, column_;
  const uint32_t inputs_;
  float next_score_;
  uint4 gates_[4] = {}, ups_[4] = {};  // by blocks of 64 columns; plain: of the next row
  ColumnBiases<kPlain> biases_[4];
};

/// down and dx: rows of a slab that is not whole, or to which a bias is to be added. Twins: gate in
/// the first two blocks, up in the others.
template <bool kTwins>
__device__ __forceinline__ void finish_rows(const Elementwise& e, const Slab& s, uint32_t results,
                                            int lane, int first_row) {
  const Scores scores(e.before ? nullptr : e.score_R, s, lane);
  const int chunk = lane % 8;
#pragma unroll 1
  for (int row = first_row; row < first_row + kSlab; row += kRowStep) {
    const float score = scores.of(row);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int column = s.first_column + (kTwins ? block % 2 : block) * 64 + chunk * 8;
      if (row >= s.num_rows || column >= s.width) continue;
      uint4 value = ptx::load_shared16(results + block * kResultBlock + swizzled(row, chunk));
      if (e.bias[0]) {
        float y[8], bias[8];
        unpack(value, y);
        unpack(load16(e.bias[0] + static_cast<int64_t>(s.expert) * s.width + column), bias);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] += score * bias[i];
        value = packed(y);
      }
      bf16* to = !kTwins ? e.rows_RD : block < 2 ? e.gate_RF : e.up_RF;
      store16(to + static_cast<int64_t>(s.first_row + row) * s.width + column, value);
    }
  }
}

}  // namespace moesh::kernels::cuda
