#include "moesh/train/metrics/scalars.h"

namespace moesh::train {

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
  all.emplace_back("skipped", r.skipped ? 1 : 0);
  for (const ValidationLoss& v : r.validation)
    all.emplace_back("validation_metrics/loss/" + v.name, v.loss);
  return all;
}

}  // namespace moesh::train
