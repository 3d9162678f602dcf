// The gradients of scores and biases: sums in a fixed order.
// T tokens, D model, F ffn, E experts, R rows at their experts

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256, kRunRows = kBiasRows;

struct ScoreParams {
  const float* terms;  // [num_terms, R]
  const int* ends_E;
  const bf16* dy_RD;
  const bf16* b2_ED;  // null: no bias
  float* d_score_R;
  int64_t num_rows;
  int num_terms, num_experts, model;
};

/// One warp per row: the terms of dh in order, and <dy, b2>.
__global__ void __launch_bounds__(kThreads) sum_score_terms(const ScoreParams p) {
  const int row = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= p.ends_E[p.num_experts - 1]) return;
  int low = -1, high = p.num_experts - 1;  // ends[low] <= row < ends[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.ends_E[middle] <= row ? low : high) = middle;
  }
  const bf16* dy = p.dy_RD + static_cast<int64_t>(row) * p.model;
  const bf16* bias = p.b2_ED + static_cast<int64_t>(high) * p.model;
  float dot = 0.f;
  for (int column = lane * 8; column < p.model; column += 256) {
    float a[8], b[8];
    unpack(load16(dy + column), a), unpack(load16(bias + column), b);
#pragma unroll
    for (int i = 0; i < 8; ++i) dot += a[i] * b[i];
  }
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) dot += __shfl_xor_sync(~0u, dot, distance);
  for (int i = 0; i < p.num_terms; ++i) dot += p.terms[i * p.num_rows + row];
  if (lane == 0) p.d_score_R[row] = dot;
}

/// The same without a bias: one thread per row.
__global__ void __launch_bounds__(kThreads) sum_plain_score_terms(const ScoreParams p) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.ends_E[p.num_experts - 1]) return;
  float sum = 0.f;
  for (int i = 0; i < p.num_terms; ++i) sum += p.terms[i * p.num_rows + row];
  p.d_score_R[row] = sum;
}

struct ColumnParams {
  bf16* rows;
  const int* ends_E;
  const float* score_R;  // null: not weighted
  const float* after_R;  // the rows are multiplied by it after the sum; null: they stay
  float* terms;          // [num_bias_terms, width]
  bf16* out;             // [E, width]; null: not wanted
  int width, num_experts;
};

/// Runs of up to kRunRows rows of one expert, numbered expert after expert.
struct RowRun {
  int expert, first, last;  // rows [first, last); expert -1: there are fewer runs
};
__device__ RowRun run_of(const int* ends_E, int num_experts, int number) {
  int first = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    const int last = ends_E[expert], count = (last - first + kRunRows - 1) / kRunRows;
    if (number < count) {
      const int begin = first + number * kRunRows;
      return {expert, begin, min(begin + kRunRows, last)};
    }
    number -= count, first = last;
  }
  return {-1, 0, 0};
}

/// terms[run] = the sum of a run's rows: all blocks have as much to do, however uneven the experts
/// are. A block has 256 columns: 32 lanes of 8 columns, 8 warps which take every eighth row.
__global__ void __launch_bounds__(kThreads) sum_columns(const ColumnParams p) {
  __shared__ float sums[8][256];
  __shared__ RowRun run;
  if (threadIdx.x == 0) run = run_of(p.ends_E, p.num_experts, blockIdx.y);
  __syncthreads();
  if (run.expert < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = blockIdx.x * 256 + lane * 8;
  float sum[8] = {};
  if (column < p.width) {
#pragma unroll 4
    for (int row = run.first + warp; row < run.last; row += 8) {
      const float factor = p.score_R ? p.score_R[row] : 1.f;
      bf16* at = p.rows + static_cast<int64_t>(row) * p.width + column;
      float v[8];
      unpack(load16(at), v);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += factor * v[i];
      if (!p.after_R) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] *= p.after_R[row];
      store16(at, packed(v));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[warp][lane * 8 + i] = sum[i];
  __syncthreads();
  const int mine = blockIdx.x * 256 + threadIdx.x;
  if (mine >= p.width) return;
  float total = 0.f;
  for (int i = 0; i < 8; ++i) total += sums[i][threadIdx.x];
  p.terms[static_cast<int64_t>(blockIdx.y) * p.width + mine] = total;
}

/// out[e] = the sum of the terms of an expert's runs, in order.
__global__ void __launch_bounds__(kThreads) sum_runs(const ColumnParams p) {
  const int expert = blockIdx.y, column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= p.width) return;
  int number = 0, first = 0;
  for (int e = 0; e < expert; ++e) {
    number += (p.ends_E[e] - first + kRunRows - 1) / kRunRows;
    first = p.ends_E[e];
  }
  const int count = (p.ends_E[expert] - first + kRunRows - 1) / kRunRows;
  float total = 0.f;
#pragma unroll 4
  for (int i = 0; i < count; ++i)
    total += p.terms[static_cast<int64_t>(number + i) * p.width + column];
  p.out[static_cast<int64_t>(expert) * p.width + column] = __float2bfloat16(total);
}

}  // namespace

Error score_gradient(const GroupedExperts& e, const void* dy_RD, const float* d_score_terms,
                     float* d_score_R, Stream stream) {
  if (e.num_rows == 0) return nullptr;
  const bool biased = e.b2_ED && !e.score_before;
  const ScoreParams p{d_score_terms,
                      e.ends_E,
                      static_cast<const bf16*>(dy_RD),
                      biased ? static_cast<const bf16*>(e.b2_ED) : nullptr,
                      d_score_R,
                      e.num_rows,
                      static_cast<int>(num_score_terms(e.ffn)),
                      static_cast<int>(e.num_experts),
                      static_cast<int>(e.model)};
  return biased
             ? launch(stream, sum_score_terms, blocks_for(e.num_rows, kThreads / 32), kThreads, p)
             : launch(stream, sum_plain_score_terms, blocks_for(e.num_rows, kThreads), kThreads, p);
}

Error bias_gradients(const GroupedExperts& e, const void* dy_RD, void* d_gate_RF, void* d_up_RF,
                     float* terms, void* db1_EF, void* db3_EF, void* db2_ED, Stream stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto num_runs = static_cast<unsigned>(num_bias_terms(e.num_rows, e.num_experts));
  const auto sum = [&](void* rows, const float* score_R, const float* after_R, void* out,
                       std::int64_t width) {
    if (!out && !after_R) return;
    const ColumnParams p{static_cast<bf16*>(rows),
                         e.ends_E,
                         score_R,
                         after_R,
                         terms,
                         static_cast<bf16*>(out),
                         static_cast<int>(width),
                         static_cast<int>(e.num_experts)};
    const auto num_tiles = static_cast<unsigned>((width + 255) / 256);
    sum_columns<<<dim3(num_tiles, num_runs), kThreads, 0, queue>>>(p);
    if (out)
      sum_runs<<<dim3(num_tiles, static_cast<unsigned>(e.num_experts)), kThreads, 0, queue>>>(p);
  };
  const float* after_R = e.score_before && (e.b1_EF || e.b3_EF) ? e.score_R : nullptr;
  sum(d_gate_RF, nullptr, after_R, db1_EF, e.ffn);
  sum(d_up_RF, nullptr, after_R, db3_EF, e.ffn);
  sum(const_cast<void*>(dy_RD), e.score_before ? nullptr : e.score_R, nullptr, db2_ED, e.model);
  return text_of(cudaGetLastError());
}

}  // namespace moesh::kernels::cuda
