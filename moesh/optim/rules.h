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

  RuleScope scope() const override { return RuleScope::element; }
  std::vector<StateSpec> state(const Stored& w) const override;
  void update(const std::vector<ParamInStep>& params, const RuleStep& step) const override;

 private:
  AdamWConfig config_;
};

// Gradient descent with momentum.

struct SgdConfig {
  double momentum = 0.9;    // 0: none, and no state
  double weight_decay = 0;  // of parameters with Decay::on

  void validate() const;
};

/// As torch.optim.SGD, with b = 0 at first:
///   b = momentum b + (g + weight_decay w)          w = w - lr b
class Sgd final : public Rule {
 public:
  explicit Sgd(const SgdConfig& config = {});

  RuleScope scope() const override { return RuleScope::element; }
  std::vector<StateSpec> state(const Stored& w) const override;
  void update(const std::vector<ParamInStep>& params, const RuleStep& step) const override;

 private:
  SgdConfig config_;
};

}  // namespace moesh::optim
