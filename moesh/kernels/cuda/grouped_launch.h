#pragma once
// Launches a kernel of grouped.h.

#include "moesh/kernels/cuda/grouped.h"
#include "moesh/kernels/cuda/host.h"

namespace moesh::kernels::cuda {

/// The tensors of one GEMM as TMA sees them; the first error is kept.
class GroupedLaunch {
 public:
  explicit GroupedLaunch(const GroupedExperts& e) {
    if (e.model % 8 != 0 || e.ffn % 8 != 0 || e.model <= 0 || e.ffn <= 0)
      error_ = "model and ffn are to be multiples of 8";
    if (e.num_experts < 1 || e.num_experts > kMaxExperts) error_ = "experts are to be 1 to 512";
    if (e.num_rows > 0x7fffffff) error_ = "rows are to be fewer than 2^31";
    params.ends_E = e.ends_E;
    params.num_experts = static_cast<int>(e.num_experts);
    params.height = static_cast<int>(e.model);
    params.num_parts = 1;
    params.elementwise.score_R = e.score_R;
    params.elementwise.before = e.score_before;
    params.elementwise.clamped = e.clamped;
    params.elementwise.num_rows = e.num_rows;
    params.elementwise.trains_biases = !e.frozen && (e.b1_EF || e.b3_EF);
    params.tail_depth = static_cast<int>(e.added.rank);
    if (e.added.rank % 8 != 0 || e.added.rank < 0) error_ = "the rank is to be a multiple of 8";
    if (e.added.rank > 0)
      params.tail_a = map(e.added.rows_Rr, e.added.rank, e.num_rows, 1, kTileK, kTileM);
  }

  CUtensorMap map(const void* base, std::int64_t x, std::int64_t y, std::int64_t z, int box_x,
                  int box_y) {
    return error_ ? CUtensorMap{} : tensor_map(base, x, y, z, box_x, box_y, error_);
  }

  CUtensorMap map_of_scales(const float* base, std::int64_t x, std::int64_t y, int box_x) {
    return error_ ? CUtensorMap{} : tensor_map(base, x, y, box_x, error_);
  }

  template <Gemm kGemm, bool kPlain = true>
  Error launch(Stream stream) {
    if constexpr (!Flow<kGemm>::kOverRows && !Flow<kGemm>::kFloat8)
      if (params.tail_depth > 0) return launch_kernel<kGemm, kPlain, true>(stream);
    return launch_kernel<kGemm, kPlain, false>(stream);
  }

  GroupedParams params = {};

 private:
  template <Gemm kGemm, bool kPlain, bool kTail>
  Error launch_kernel(Stream stream) {
    static Prepared prepared;
    const auto kernel = grouped::kernel<kGemm, kPlain, kTail>;
    constexpr int kBytes = sizeof(grouped::Shared);
    static_assert(kBytes <= 227 * 1024);
    int num_blocks = 0;
    if (!error_) error_ = prepared(kernel, grouped::kThreads, kBytes, 2, num_blocks);
    if (error_) return error_;
    kernel<<<num_blocks, grouped::kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(params);
    return text_of(cudaGetLastError());
  }

  Error error_ = nullptr;
};

}  // namespace moesh::kernels::cuda
