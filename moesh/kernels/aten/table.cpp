#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace aten {

// Each is in a file of its kind.
TopKKernel top_k;
SortKernel sort_by_expert;
ReorderKernel rank_major_to_expert_major;
GatherKernel gather_rows;
GateForwardKernel gate_forward;
GateBackwardKernel gate_backward;
CombineKernel combine_rows;
ExpertsForwardKernel experts_forward;
ExpertsBackwardKernel experts_backward;
NormForwardKernel norm_forward;
NormBackwardKernel norm_backward;
RotateKernel rotate_forward;
RotateKernel rotate_backward;
AddSinksKernel add_sinks_;
SinkGradientKernel sink_gradient;
LogitSumsKernel logit_sums;
LogitGradientKernel logit_gradient_;
LatentForwardKernel latent_heads_forward;
LatentBackwardKernel latent_heads_backward;
SwigluForwardKernel swiglu_forward;
SwigluBackwardKernel swiglu_backward;
CastKernel cast_into;
AdamWKernel adamw_;
SumOfSquaresKernel sum_of_squares;

}  // namespace aten

const KernelTable& aten_kernels() {
  static const KernelTable table{.name = "aten",
                                 .top_k = aten::top_k,
                                 .sort_by_expert = aten::sort_by_expert,
                                 .rank_major_to_expert_major = aten::rank_major_to_expert_major,
                                 .gate_forward = aten::gate_forward,
                                 .gate_backward = aten::gate_backward,
                                 .gather_rows = aten::gather_rows,
                                 .combine_rows = aten::combine_rows,
                                 .experts_forward = aten::experts_forward,
                                 .experts_backward = aten::experts_backward,
                                 .norm_forward = aten::norm_forward,
                                 .norm_backward = aten::norm_backward,
                                 .rotate_forward = aten::rotate_forward,
                                 .rotate_backward = aten::rotate_backward,
                                 .add_sinks_ = aten::add_sinks_,
                                 .sink_gradient = aten::sink_gradient,
                                 .logit_sums = aten::logit_sums,
                                 .logit_gradient_ = aten::logit_gradient_,
                                 .latent_heads_forward = aten::latent_heads_forward,
                                 .latent_heads_backward = aten::latent_heads_backward,
                                 .swiglu_forward = aten::swiglu_forward,
                                 .swiglu_backward = aten::swiglu_backward,
                                 .cast_into = aten::cast_into,
                                 .adamw_ = aten::adamw_,
                                 .sum_of_squares = aten::sum_of_squares,
                                 .attention_forward = nullptr,
                                 .attention_backward = nullptr};
  return table;
}

}  // namespace moesh::kernels
