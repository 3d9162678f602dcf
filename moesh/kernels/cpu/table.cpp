#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace cpu {

// Each is in the file of its name or kind. The gate is a small product, left to the library.
TopKKernel top_k;
SortKernel sort_by_expert;
ReorderKernel rank_major_to_expert_major;
GatherKernel gather_rows;
CombineKernel combine_rows;
ExpertsForwardKernel experts_forward;
ExpertsBackwardKernel experts_backward;
AdamWKernel adamw_;
SumOfSquaresKernel sum_of_squares;
AttentionForwardKernel attention_forward;
AttentionBackwardKernel attention_backward;

}  // namespace cpu

const KernelTable& cpu_kernels() {
  static const KernelTable table{.name = "cpu",
                                 .top_k = cpu::top_k,
                                 .sort_by_expert = cpu::sort_by_expert,
                                 .rank_major_to_expert_major = cpu::rank_major_to_expert_major,
                                 .gate_forward = aten_kernels().gate_forward,
                                 .gate_backward = aten_kernels().gate_backward,
                                 .gather_rows = cpu::gather_rows,
                                 .combine_rows = cpu::combine_rows,
                                 .experts_forward = cpu::experts_forward,
                                 .experts_backward = cpu::experts_backward,
                                 .norm_forward = aten_kernels().norm_forward,
                                 .norm_backward = aten_kernels().norm_backward,
                                 .rotate_forward = aten_kernels().rotate_forward,
                                 .rotate_backward = aten_kernels().rotate_backward,
                                 .add_sinks_ = aten_kernels().add_sinks_,
                                 .sink_gradient = aten_kernels().sink_gradient,
                                 .logit_sums = aten_kernels().logit_sums,
                                 .logit_gradient_ = aten_kernels().logit_gradient_,
                                 .latent_heads_forward = aten_kernels().latent_heads_forward,
                                 .latent_heads_backward = aten_kernels().latent_heads_backward,
                                 .swiglu_forward = aten_kernels().swiglu_forward,
                                 .swiglu_backward = aten_kernels().swiglu_backward,
                                 .cast_into = aten_kernels().cast_into,
                                 .adamw_ = cpu::adamw_,
                                 .sum_of_squares = cpu::sum_of_squares,
                                 .attention_forward = cpu::attention_forward,
                                 .attention_backward = cpu::attention_backward};
  return table;
}

}  // namespace moesh::kernels
