#include "moesh/train/metrics/collapse.h"

#include <algorithm>

#include "moesh/base/error.h"

namespace moesh::train {

std::vector<std::string> CollapseWatch::observe(const std::vector<at::Tensor>& counts_E) {
  std::vector<std::string> warnings;
  layers_.resize(counts_E.size());
  for (std::size_t l = 0; l < counts_E.size(); ++l) {
    const at::Tensor counts = counts_E[l].to(at::kLong).contiguous();
    const auto* count = counts.const_data_ptr<std::int64_t>();
    Layer& layer = layers_[l];
    layer.steps_idle.resize(static_cast<std::size_t>(counts.numel()));
    for (std::size_t e = 0; e < layer.steps_idle.size(); ++e)
      layer.steps_idle[e] = count[e] == 0 ? layer.steps_idle[e] + 1 : 0;
    const auto num_experts = counts.numel(),
               num_idle = static_cast<std::int64_t>(
                   std::count_if(layer.steps_idle.begin(), layer.steps_idle.end(),
                                 [](std::int64_t steps) { return steps >= kPatience; }));
    const bool has_collapsed = num_idle > 0 && 4 * num_idle >= num_experts;
    if (has_collapsed && !layer.is_told)
      warnings.push_back(detail::concat(
          "MoE layer ", l, ": ", num_idle, " of ", num_experts, " experts have had no token for ",
          kPatience,
          " steps, so the model is as good as smaller; raise moe.load_balance_coeff or "
          "moe.balance_loss_weight, or lower optimizer.lr"));
    layer.is_told = has_collapsed;
  }
  return warnings;
}

}  // namespace moesh::train
