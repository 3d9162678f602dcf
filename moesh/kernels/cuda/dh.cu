// The gradients of gate, up and score of dy.
#include "moesh/kernels/cuda/grouped_launch.h"

namespace moesh::kernels::cuda {

Error dh(const GroupedExperts& e, const void* dy_RD, void* gate_RF, void* up_RF, void* act_RF,
         float* d_score_terms, Stream stream) {
  if (e.num_rows == 0) return nullptr;
  const bool biased = e.b1_EF || e.b3_EF;
  GroupedLaunch l(e);
  GroupedParams& p = l.params;
  p.a[0] = l.map(dy_RD, e.model, e.num_rows, 1, kTileK, kTileM);
  p.width = static_cast<int>(e.ffn);
  p.depth = static_cast<int>(e.model);
  p.b[0] = l.map(e.w2_EDF, e.ffn, e.model, e.num_experts, 64, kTileK);
  if (const LowRankTerm& t = e.added; t.rank > 0)
    p.tail_b = l.map(t.matrix, e.ffn, t.rank, e.num_experts, 64, kTileK);
  p.elementwise.bias[0] = static_cast<const bf16*>(e.b1_EF);
  p.elementwise.bias[1] = static_cast<const bf16*>(e.b3_EF);
  p.elementwise.gate_RF = static_cast<bf16*>(gate_RF);
  p.elementwise.up_RF = static_cast<bf16*>(up_RF);
  p.elementwise.act_RF = static_cast<bf16*>(act_RF);
  p.elementwise.d_score = d_score_terms;
  const bool plain = !biased && !e.clamped && !(e.score_before && e.score_R);
  return plain ? l.launch<Gemm::dh, true>(stream) : l.launch<Gemm::dh, false>(stream);
}

}  // namespace moesh::kernels::cuda
