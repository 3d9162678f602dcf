#pragma once
#include "moesh/optim/optimizer.h"

namespace moesh::optim {

struct SgdConfig {
  double momentum = 0.9;    // 0: none, and no state
  double weight_decay = 0;  // of the group `decay`

  void validate() const;
};

/// Gradient descent with momentum, as torch.optim.SGD: b = momentum b + (g + weight_decay w), w = w
/// - lr b; b is 0 at first.
class Sgd final : public Optimizer {
 public:
  explicit Sgd(ParamList params, const SgdConfig& config = {});

 private:
  void update(const std::vector<Moving>& params, double lr, std::int64_t step) override;
  SgdConfig config_;
};

}  // namespace moesh::optim
