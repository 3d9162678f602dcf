#pragma once
// AdamW: the mean and the mean square of the gradients of each element.

#include "moesh/optim/rule.h"

namespace moesh::optim {

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  // of parameters with Decay::on

  void validate() const;
};

/// AdamW (Loshchilov and Hutter, 2019): weight decay beside the gradient, not in it. In step t,
/// from 1:
///   m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
///   w = w - lr weight_decay w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
class AdamW final : public Rule {
 public:
  explicit AdamW(const AdamWConfig& config = {});

  Sees sees() const override { return Sees::element; }
  std::vector<StateSpec> state(const Stored& w) const override;
  void update(const std::vector<Moving>& params, const RuleStep& step) const override;

 private:
  AdamWConfig config_;
};

namespace raw {
/// The numbers of one step.
struct AdamWStep {
  double lr, beta1, beta2, eps, weight_decay;
  std::int64_t step;
};
/// On the CPU: one pass over the memory, with the same instructions for all elements, so that no
/// bit depends on where a shard begins. (ATen's kernels use fused multiply-add in their vector loop
/// and not in its remainder.)
void adamw_loop(const AdamWStep& s, const at::Tensor& w, const at::Tensor& g, const at::Tensor& m,
                const at::Tensor& v);
/// On any device: ATen's multi-tensor kernel, a few launches for all parameters.
void adamw_fused(const AdamWStep& s, const std::vector<at::Tensor>& w,
                 const std::vector<at::Tensor>& g, const std::vector<at::Tensor>& m,
                 const std::vector<at::Tensor>& v);
}  // namespace raw

}  // namespace moesh::optim
