#include "moesh/train/metrics/record.h"

#include <algorithm>

namespace moesh::train {

ExpertLoad expert_load(const std::vector<at::Tensor>& counts_E) {
  ExpertLoad load;
  for (const auto& c : counts_E) {
    const double mean = c.to(at::kDouble).mean().item<double>();
    if (mean > 0) load.max_over_mean = std::max(load.max_over_mean, c.max().item<double>() / mean);
    load.num_idle += c.eq(0).sum().item<std::int64_t>();
  }
  return load;
}

}  // namespace moesh::train
