// From tokens to their rows, and from rows to the sums of each token: both pass memory once.
// T tokens, D model, K top-k, R rows at their experts

#include "moesh/kernels/cuda/activation.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {
namespace {

constexpr int kThreads = 256, kBatch = 8;

struct CombineParams {
  const bf16* rows_RD;
  const int* inverse_TK;
  const bf16* addend_TD;
  bf16* out_TD;
  unsigned num_chunks;  // of 8 columns in a row
  int top_k;
  unsigned size;  // chunks in all: divisions of 64 bits take as long as the memory
};

struct ExpandParams {
  const bf16* x_TD;
  const int* inverse_TK;
  bf16* rows_RD;
  unsigned num_chunks;
  int top_k;
  unsigned size;
};

__device__ __forceinline__ void add(float (&sum)[8], uint4 term) {
  float v[8];
  unpack(term, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] += v[i];
}

/// One thread per 16 bytes of the output; the loads of up to eight rows are in flight at once.
__global__ void __launch_bounds__(kThreads) combine_kernel(const CombineParams p) {
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.size) return;
  const unsigned token = at / p.num_chunks, chunk = at - token * p.num_chunks;
  float sum[8] = {};
  if (p.addend_TD) add(sum, load16(p.addend_TD + at * int64_t{8}));
  const int* inverse = p.inverse_TK + static_cast<int64_t>(token) * p.top_k;
  for (int first = 0; first < p.top_k; first += kBatch) {
    uint4 term[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i < p.top_k ? __ldg(inverse + first + i) : -1;
      const bf16* from = p.rows_RD + (static_cast<int64_t>(row) * p.num_chunks + chunk) * 8;
      term[i] = row >= 0 ? __ldcs(reinterpret_cast<const uint4*>(from)) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) add(sum, term[i]);
  }
  store16(p.out_TD + at * int64_t{8}, packed(sum));
}

/// One thread per 16 bytes of x, which are read once and written K times.
__global__ void __launch_bounds__(kThreads) expand_kernel(const ExpandParams p) {
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= p.size) return;
  const unsigned token = at / p.num_chunks, chunk = at - token * p.num_chunks;
  const int* inverse = p.inverse_TK + static_cast<int64_t>(token) * p.top_k;
  const uint4 value = __ldcs(reinterpret_cast<const uint4*>(p.x_TD + at * int64_t{8}));
#pragma unroll 8
  for (int k = 0; k < p.top_k; ++k) {
    const int row = __ldg(inverse + k);
    if (row < 0) continue;
    store16(p.rows_RD + (static_cast<int64_t>(row) * p.num_chunks + chunk) * 8, value);
  }
}

Error complaint(int64_t num_tokens, int64_t width) {
  if (width % 8 != 0) return "the width of rows is to be a multiple of 8";
  return num_tokens * width >> 34 ? "tokens have fewer than 2^34 numbers in all" : nullptr;
}

}  // namespace

Error expand(const void* x_TD, const std::int32_t* inverse_TK, void* rows_RD,
             std::int64_t num_tokens, std::int64_t top_k, std::int64_t width, Stream stream) {
  if (Error error = complaint(num_tokens, width)) return error;
  const ExpandParams p{
      static_cast<const bf16*>(x_TD), inverse_TK,
      static_cast<bf16*>(rows_RD),    static_cast<unsigned>(width / 8),
      static_cast<int>(top_k),        static_cast<unsigned>(num_tokens * width / 8)};
  if (p.size == 0) return nullptr;
  return launch(stream, expand_kernel, blocks_for(p.size, kThreads), kThreads, p);
}

Error combine(const void* rows_RD, const std::int32_t* inverse_TK, const void* addend_TD,
              void* out_TD, std::int64_t num_tokens, std::int64_t top_k, std::int64_t width,
              Stream stream) {
  if (Error error = complaint(num_tokens, width)) return error;
  const CombineParams p{static_cast<const bf16*>(rows_RD),
                        inverse_TK,
                        static_cast<const bf16*>(addend_TD),
                        static_cast<bf16*>(out_TD),
                        static_cast<unsigned>(width / 8),
                        static_cast<int>(top_k),
                        static_cast<unsigned>(num_tokens * width / 8)};
  if (p.size == 0) return nullptr;
  return launch(stream, combine_kernel, blocks_for(p.size, kThreads), kThreads, p);
}

}  // namespace moesh::kernels::cuda
