#include "moesh/train/metrics/record.h"

#include <algorithm>

#include "moesh/base/error.h"

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

std::vector<Float8Share> float8_shares(const at::Tensor& counts) {
  std::vector<Float8Share> all;
  if (!counts.defined()) return all;
  constexpr const char *kProducts[] = {"experts", "dense"},
                       *kNumbers[] = {"activations", "gradients", "weights"};
  for (std::int64_t p = 0; p < 2; ++p)
    for (std::int64_t n = 0; n < 3; ++n) {
      const at::Tensor found = counts.select(1, p).select(1, n).to(at::kDouble);  // [layers, 3]
      if (found.select(1, 0).sum().item<double>() == 0) continue;
      const auto share = [&](std::int64_t place) {
        const at::Tensor shares = found.select(1, place).div(found.select(1, 0)).contiguous();
        const auto* first = shares.const_data_ptr<double>();
        return std::vector<double>(first, first + shares.numel());
      };
      all.push_back({kProducts[p], kNumbers[n], share(1), share(2)});
    }
  return all;
}

Scalars scalars_of(const StepRecord& r) {
  Scalars all{{"loss_metrics/global_avg_loss", r.loss},
              {"loss_metrics/total_loss", r.total_loss},
              {"grad_norm", r.grad_norm},
              {"lr", r.lr},
              {"n_tokens_seen", static_cast<double>(r.num_tokens_all)},
              {"throughput(tps)", r.tokens_per_second()},
              {"tflops", r.tflops()},
              {"memory/max_active(GiB)", r.memory_gib},
              {"time_metrics/end_to_end(s)", r.seconds},
              {"time_metrics/data_loading(s)", r.sections[Section::data]},
              {"time_metrics/data_loading(%)", 100 * r.sections[Section::data] / r.seconds}};
  if (r.max_logit) all.emplace_back("max_logit", *r.max_logit);
  if (r.peak_tflops > 0) all.emplace_back("mfu(%)", 100 * r.peak_fraction());
  for (std::size_t i = 0; i < r.auxiliary.size(); ++i)
    if (r.auxiliary[i] != 0)
      all.emplace_back(std::string("loss_metrics/") + kAuxiliaryNames[i], r.auxiliary[i]);
  for (std::size_t i = 0; i < kNumSections; ++i) {
    const auto section = static_cast<Section>(i);
    if (section != Section::data)
      all.emplace_back(std::string("time_metrics/") + to_string(section) + "(s)",
                       r.sections[section]);
  }
  for (const auto& [axes, bytes] : r.sent)
    all.emplace_back("sent/" + axes + "(bytes)", static_cast<double>(bytes));
  all.emplace_back("experts/max_over_mean", r.experts.max_over_mean);
  all.emplace_back("experts/idle", static_cast<double>(r.experts.num_idle));
  for (std::size_t l = 0; l < r.experts.entropy.size(); ++l)
    all.emplace_back("experts/entropy/layer_" + std::to_string(l), r.experts.entropy[l]);
  for (std::size_t l = 0; l < r.bias.size(); ++l)
    all.emplace_back("experts/bias_range/layer_" + std::to_string(l),
                     r.bias[l].largest - r.bias[l].least);
  for (const Float8Share& f : r.float8)
    for (const auto& [name, shares] : {std::pair("zeros", &f.zeros), {"largest", &f.largest}})
      for (std::size_t l = 0; l < shares->size(); ++l)
        if (!std::isnan((*shares)[l]))
          all.emplace_back(
              detail::concat("float8/", f.products, "/", f.numbers, "/", name, "/layer_", l),
              (*shares)[l]);
  all.emplace_back("skipped", r.skipped ? 1 : 0);
  for (const ValidationLoss& v : r.validation) {
    all.emplace_back("validation_metrics/loss/" + v.name, v.loss);
    for (std::size_t k = 0; k < v.mtp.size(); ++k) {
      const std::string depth = "_depth_" + std::to_string(k + 1) + "/";
      all.emplace_back("validation_metrics/mtp_loss" + depth + v.name, v.mtp[k].loss);
      all.emplace_back("validation_metrics/mtp_acceptance" + depth + v.name, v.mtp[k].acceptance);
    }
  }
  return all;
}

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
          " steps, so the model is effectively smaller; raise moe.load_balance_coeff or "
          "moe.balance_loss_weight, or lower optimizer.lr"));
    layer.is_told = has_collapsed;
  }
  return warnings;
}

}  // namespace moesh::train
