// The gradient of each row's input: one GEMM of depth 2 F, d_gate with W1 and then d_up with W3.
#include "moesh/kernels/cuda/grouped_launch.h"

namespace moesh::kernels::cuda {

Error dx(const GroupedExperts& e, const void* d_gate_RF, const void* d_up_RF, void* dx_RD,
         Stream stream) {
  if (e.num_rows == 0) return nullptr;
  GroupedLaunch l(e);
  GroupedParams& p = l.params;
  p.width = static_cast<int>(e.model);
  p.depth = static_cast<int>(e.ffn);
  p.num_parts = d_up_RF ? 2 : 1;
  p.a[0] = l.map(d_gate_RF, e.ffn, e.num_rows, 1, kTileK, kTileM);
  p.b[0] = l.map(e.w1_EFD, e.model, e.ffn, e.num_experts, 64, kTileK);
  if (d_up_RF) {
    p.a[1] = l.map(d_up_RF, e.ffn, e.num_rows, 1, kTileK, kTileM);
    p.b[1] = l.map(e.w3_EFD, e.model, e.ffn, e.num_experts, 64, kTileK);
  }
  if (const LowRankTerm& t = e.added; t.rank > 0)
    p.tail_b = l.map(t.matrix, e.model, t.rank, e.num_experts, 64, kTileK);
  p.out[0] = l.map(dx_RD, e.model, e.num_rows, 1, 64, kSlab);
  p.elementwise.rows_RD = static_cast<bf16*>(dx_RD);
  return l.launch<Gemm::dx>(stream);
}

}  // namespace moesh::kernels::cuda
