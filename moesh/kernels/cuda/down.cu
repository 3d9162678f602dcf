// The experts' outputs from their hidden states.
#include "moesh/kernels/cuda/grouped_launch.h"

namespace moesh::kernels::cuda {

Error down(const GroupedExperts& e, const void* act_RF, void* y_RD, Stream stream) {
  if (e.num_rows == 0) return nullptr;
  GroupedLaunch l(e);
  GroupedParams& p = l.params;
  p.width = static_cast<int>(e.model);
  p.depth = static_cast<int>(e.ffn);
  p.a[0] = l.map(act_RF, e.ffn, e.num_rows, 1, kTileK, kTileM);
  p.b[0] = l.map(e.w2_EDF, e.ffn, e.model, e.num_experts, kTileK, 128);
  p.out[0] = l.map(y_RD, e.model, e.num_rows, 1, 64, kSlab);
  if (const LowRankTerm& t = e.added; t.rank > 0)
    p.tail_b = l.map(t.matrix, t.rank, e.model, e.num_experts, kTileK, 128);
  p.elementwise.bias[0] = static_cast<const bf16*>(e.b2_ED);
  p.elementwise.rows_RD = static_cast<bf16*>(y_RD);
  return l.launch<Gemm::down>(stream);
}

}  // namespace moesh::kernels::cuda
