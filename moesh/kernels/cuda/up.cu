// gate and up of the experts, and their activation.
#include "moesh/kernels/cuda/grouped_launch.h"

namespace moesh::kernels::cuda {

Error up(const GroupedExperts& e, const void* x_RD, void* gate_RF, void* up_RF, void* act_RF,
         Stream stream) {
  if (e.num_rows == 0) return nullptr;
  const bool biased = e.b1_EF || e.b3_EF;
  GroupedLaunch l(e);
  GroupedParams& p = l.params;
  p.a[0] = l.map(x_RD, e.model, e.num_rows, 1, kTileK, kTileM);
  p.width = static_cast<int>(e.ffn);
  p.depth = static_cast<int>(e.model);
  p.b[0] = l.map(e.w1_EFD, e.model, e.ffn, e.num_experts, kTileK, 128);
  p.b[1] = l.map(e.w3_EFD, e.model, e.ffn, e.num_experts, kTileK, 128);
  p.out[0] = l.map(gate_RF, e.ffn, e.num_rows, 1, 64, kSlab);
  p.out[1] = l.map(up_RF, e.ffn, e.num_rows, 1, 64, kSlab);
  p.elementwise.bias[0] = static_cast<const bf16*>(e.b1_EF);
  p.elementwise.bias[1] = static_cast<const bf16*>(e.b3_EF);
  p.elementwise.gate_RF = static_cast<bf16*>(gate_RF);
  p.elementwise.up_RF = static_cast<bf16*>(up_RF);
  p.elementwise.act_RF = static_cast<bf16*>(act_RF);
  if (const LowRankTerm& t = e.added; t.rank > 0)
    p.tail_b = l.map(t.matrix, t.rank, e.ffn, 2 * e.num_experts, kTileK, 128);
  const bool plain = !biased && !e.clamped && !(e.score_before && e.score_R);
  return plain ? l.launch<Gemm::up, true>(stream) : l.launch<Gemm::up, false>(stream);
}

}  // namespace moesh::kernels::cuda
