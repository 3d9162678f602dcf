#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace cpu {

// Each is in the file of its name or kind.
decltype(kernels::top_k) top_k;
SortKernel sort_by_expert;
decltype(kernels::rank_major_to_expert_major) rank_major_to_expert_major;
decltype(kernels::gather_rows) gather_rows;
decltype(kernels::combine_rows) combine_rows;
decltype(kernels::experts_forward) experts_forward;
decltype(kernels::experts_backward) experts_backward;
decltype(kernels::adamw_) adamw_;
SumOfSquaresKernel sum_of_squares;
decltype(kernels::attention_forward) attention_forward;
decltype(kernels::attention_backward) attention_backward;

}  // namespace cpu

const KernelTable& cpu_kernels() {
  static const KernelTable table = [] {
    KernelTable t = aten_kernels();
    t.name = "cpu";
    t.top_k = cpu::top_k;
    t.sort_by_expert = cpu::sort_by_expert;
    t.rank_major_to_expert_major = cpu::rank_major_to_expert_major;
    t.gather_rows = cpu::gather_rows;
    t.combine_rows = cpu::combine_rows;
    t.experts_forward = cpu::experts_forward;
    t.experts_backward = cpu::experts_backward;
    t.experts_take_float8 = false;
    t.adamw_ = cpu::adamw_;
    t.sum_of_squares = cpu::sum_of_squares;
    t.attention_forward = cpu::attention_forward;
    t.attention_backward = cpu::attention_backward;
    return t;
  }();
  return table;
}

}  // namespace moesh::kernels
