// The gradients of the weights: sums over the rows of each expert.
#include "moesh/kernels/cuda/grouped_launch.h"

namespace moesh::kernels::cuda {

namespace {

Error fill_zeros(void* to, const GroupedExperts& e, Stream stream) {
  return text_of(cudaMemsetAsync(to, 0, e.num_experts * e.model * e.ffn * sizeof(bf16),
                                 static_cast<cudaStream_t>(stream)));
}

template <Gemm kGemm>
Error launch(GroupedLaunch& l, const GroupedExperts& e, void* workspace, Stream stream) {
  GroupedParams& p = l.params;
  p.max_chunk_pairs = chunk_pairs(e.num_rows, e.model, e.ffn);
  p.chunk_sums = static_cast<float4*>(workspace);
  p.chunk_counts = static_cast<int*>(workspace) + int64_t{p.max_chunk_pairs} * kChunkSums;
  if (p.max_chunk_pairs > 0) {
    const Error error =
        text_of(cudaMemsetAsync(p.chunk_counts, 0, p.max_chunk_pairs * kChunkCounts * sizeof(int),
                                static_cast<cudaStream_t>(stream)));
    if (error) return error;
  }
  return l.launch<kGemm>(stream);
}

}  // namespace

Error dw13(const GroupedExperts& e, const void* x_RD, const void* d_gate_RF, const void* d_up_RF,
           void* dw1_EFD, void* dw3_EFD, void* workspace, Stream stream) {
  if (e.num_rows == 0) {
    const Error error = fill_zeros(dw1_EFD, e, stream);
    return error ? error : fill_zeros(dw3_EFD, e, stream);
  }
  GroupedLaunch l(e);
  GroupedParams& p = l.params;
  p.a[0] = l.map(x_RD, e.model, e.num_rows, 1, 64, kTileK);
  p.width = static_cast<int>(e.ffn);
  p.b[0] = l.map(d_gate_RF, e.ffn, e.num_rows, 1, 64, kTileK);
  p.b[1] = l.map(d_up_RF, e.ffn, e.num_rows, 1, 64, kTileK);
  p.out[0] = l.map(dw1_EFD, e.model, e.ffn, e.num_experts, 64, 64);
  p.out[1] = l.map(dw3_EFD, e.model, e.ffn, e.num_experts, 64, 64);
  return launch<Gemm::dw13>(l, e, workspace, stream);
}

Error dw2(const GroupedExperts& e, const void* dy_RD, const void* act_RF, void* dw2_EDF,
          void* workspace, Stream stream) {
  if (e.num_rows == 0) return fill_zeros(dw2_EDF, e, stream);
  GroupedLaunch l(e);
  GroupedParams& p = l.params;
  p.a[0] = l.map(dy_RD, e.model, e.num_rows, 1, 64, kTileK);
  p.width = static_cast<int>(e.ffn);
  p.b[0] = l.map(act_RF, e.ffn, e.num_rows, 1, 64, kTileK);
  p.out[0] = l.map(dw2_EDF, e.ffn, e.model, e.num_experts, 64, 64);
  return launch<Gemm::dw2>(l, e, workspace, stream);
}

}  // namespace moesh::kernels::cuda
