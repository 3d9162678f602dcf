#include "moesh/train/metrics/record.h"

#include <algorithm>

namespace moesh::train {

ExpertLoad expert_load(const std::vector<at::Tensor>& counts_E) {
  ExpertLoad load;
  for (const at::Tensor& tensor : counts_E) {
    const at::Tensor counts = tensor.contiguous();
    const auto* count = counts.const_data_ptr<std::int64_t>();
    const auto num_experts = counts.numel();
    std::int64_t total = 0, most = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      total += count[e], most = std::max(most, count[e]);
      if (count[e] == 0) ++load.num_idle;
    }
    double entropy = 0;
    for (std::int64_t e = 0; e < num_experts; ++e) {
      if (count[e] == 0) continue;
      const double share = static_cast<double>(count[e]) / static_cast<double>(total);
      entropy -= share * std::log(share);
    }
    load.entropy.push_back(entropy);
    if (total > 0)
      load.max_over_mean = std::max(load.max_over_mean, static_cast<double>(most) *
                                                            static_cast<double>(num_experts) /
                                                            static_cast<double>(total));
  }
  return load;
}

}  // namespace moesh::train
