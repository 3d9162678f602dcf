#pragma once
// Gradient descent with momentum.

#include "moesh/optim/rule.h"

namespace moesh::optim {

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

  Sees sees() const override { return Sees::element; }
  std::vector<StateSpec> state(const Stored& w) const override;
  void update(const std::vector<Moving>& params, const RuleStep& step) const override;

 private:
  SgdConfig config_;
};

}  // namespace moesh::optim
