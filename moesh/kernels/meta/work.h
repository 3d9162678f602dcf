#pragma once
// What the kernels of an accelerator would have to do in a dry run: FLOPs, and bytes to and from
// memory, kernel by kernel. How long that takes is for others to say (estimate/layer_time.h).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>

namespace moesh::kernels::meta {

/// Kernels that reach different speeds.
enum class WorkKind {
  experts,         // a product of each expert's rows
  dense,           // a product of two matrices
  float8_experts,  // the same two, of codes of float8
  float8_dense,
  attention,         // heads of more than 64 features
  narrow_attention,  // heads of up to 64 features
  window_attention,  // a window of up to 128 keys
  masked_attention,  // with a mask: what it hides is computed as well
  delta_rule,        // Gated DeltaNet
  rows,              // a pass over rows, to or from their experts
  large_pass,        // over many parameters at once
  pass_of_step,      // over parameters, in the first micro-batch of a step only
  pass,              // another pass over memory
};

struct KernelWork {
  WorkKind kind = WorkKind::pass;
  double flops = 0, bytes = 0;
  double wasted = 0;  // further FLOPs, of rows that are not there
  auto operator<=>(const KernelWork&) const = default;
};

/// How often each kernel ran.
using WorkLedger = std::map<KernelWork, double>;

/// One more kernel.
void note_work(const KernelWork& work);
/// All kernels since the last call.
WorkLedger take_work();

/// Attention of h query heads, causal up to a window (0: none) or with a mask.
struct AttentionShape {
  double batch, num_queries, num_keys, num_heads, num_groups, width, value_width;
  double window = 0;
  bool has_mask = false;
};
/// The scores that a kernel computes for one head of one sequence.
double num_scores(const AttentionShape& shape);
void note_attention(const AttentionShape& shape, bool is_backward);

/// The kernels of the experts of a rank, for rows that spread evenly over them: six products, and
/// the rows once from tokens to experts or back. In float8 also the passes that make codes.
struct ExpertsWork {
  KernelWork up, down;           // forward
  KernelWork dh, dx, dw2, dw13;  // backward
  KernelWork move;
  KernelWork codes_of_x, codes_of_hidden, codes_of_dy, codes_of_d_hidden;
  KernelWork write_rows;        // besides their codes, where dy goes from tokens to experts
  KernelWork codes_of_weights;  // for one direction, where they are not kept
};
/// `num_tokens` rows are rounded for `num_rows` at their experts; 0: no product is in float8.
ExpertsWork work_of_experts(std::int64_t num_rows, const at::Tensor& w1_eFD,
                            std::int64_t num_tokens = 0);

/// A pass over these: each is read or written once.
void note_pass(std::initializer_list<at::Tensor> tensors);

/// While it lives, LibTorch's own operations of this thread are noted: products and attention by
/// their shapes, and the others as passes over what they read and write.
class OperationWatch {
 public:
  OperationWatch();
  ~OperationWatch();
  OperationWatch(const OperationWatch&) = delete;
  OperationWatch& operator=(const OperationWatch&) = delete;

 private:
  std::uint64_t handle_;
};

}  // namespace moesh::kernels::meta
