#include "moesh/train/metrics/record.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

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

namespace {

using formats::JsonValue;

template <auto member>
JsonValue value_of(const StepRecord& r) {
  return {std::invoke(member, r)};
}

template <std::size_t part>
JsonValue auxiliary_of(const StepRecord& r) {
  return {r.auxiliary[part]};
}

}  // namespace

const std::vector<MetricNumber>& metric_numbers() {
  static const std::vector<MetricNumber> all{
      {"step", value_of<&StepRecord::step>},
      {"time", value_of<&StepRecord::time>, 13},
      {"loss", value_of<&StepRecord::loss>},
      {"total_loss", value_of<&StepRecord::total_loss>},
      {"grad_norm", value_of<&StepRecord::grad_norm>},
      {"lr", value_of<&StepRecord::lr>, 9},
      {"seconds", value_of<&StepRecord::seconds>, 6},
      {"tps", value_of<&StepRecord::tokens_per_second>, 6},
      {"tflops", value_of<&StepRecord::tflops>, 6},
      {"memory_gib", value_of<&StepRecord::memory_gib>, 4},
      {"expert_max_over_mean",
       [](const StepRecord& r) { return JsonValue{r.experts.max_over_mean}; }, 6},
      {"experts_idle", [](const StepRecord& r) { return JsonValue{r.experts.num_idle}; }},
      {"tokens", value_of<&StepRecord::num_tokens>},
      {"tokens_total", value_of<&StepRecord::num_tokens_all>},
      {"trained_share", value_of<&StepRecord::trained_share>, 6},
      {"skipped", value_of<&StepRecord::skipped>},
      {kAuxiliaryNames[0], auxiliary_of<0>, 0, true},
      {kAuxiliaryNames[1], auxiliary_of<1>, 0, true},
      {kAuxiliaryNames[2], auxiliary_of<2>, 0, true},
      {"max_logit",
       [](const StepRecord& r) {
         return r.max_logit ? JsonValue{*r.max_logit} : JsonValue{nullptr};
       }},
      {"peak_fraction",
       [](const StepRecord& r) {
         return r.peak_tflops > 0 ? JsonValue{r.peak_fraction()} : JsonValue{nullptr};
       },
       5}};
  return all;
}

const MetricNumber& metric_number(std::string_view name) {
  const auto& all = metric_numbers();
  const auto found = std::ranges::find_if(all, [&](const auto& m) { return m.name == name; });
  MOESH_CHECK(found != all.end(), "no number of the metrics is called ", name);
  return *found;
}

std::optional<double> MetricNumber::found_in(const StepRecord& record) const {
  const JsonValue value = of(record);
  if (value.is_null()) return std::nullopt;
  const auto* flag = std::get_if<bool>(&value.value);
  const double number = flag ? (*flag ? 1 : 0) : value.as_number(name);
  return is_left_out_at_zero && number == 0 ? std::nullopt : std::optional(number);
}

Scalars scalars_of(const StepRecord& r) {
  Scalars all;
  const auto add = [&](const std::string& tag, const char* name, double factor = 1) {
    if (const auto number = metric_number(name).found_in(r))
      all.emplace_back(tag, factor * *number);
  };
  add("loss_metrics/global_avg_loss", "loss");
  add("loss_metrics/total_loss", "total_loss");
  add("grad_norm", "grad_norm");
  add("lr", "lr");
  add("n_tokens_seen", "tokens_total");
  add("throughput(tps)", "tps");
  add("tflops", "tflops");
  add("memory/max_active(GiB)", "memory_gib");
  add("time_metrics/end_to_end(s)", "seconds");
  all.emplace_back("time_metrics/data_loading(s)", r.sections[Section::data]);
  all.emplace_back("time_metrics/data_loading(%)", 100 * r.sections[Section::data] / r.seconds);
  add("max_logit", "max_logit");
  add("mfu(%)", "peak_fraction", 100);
  for (const char* name : kAuxiliaryNames) add(std::string("loss_metrics/") + name, name);
  for (std::size_t i = 0; i < kNumSections; ++i) {
    const auto section = static_cast<Section>(i);
    if (section != Section::data)
      all.emplace_back(std::string("time_metrics/") + to_string(section) + "(s)",
                       r.sections[section]);
  }
  for (const auto& [axes, bytes] : r.sent)
    all.emplace_back("sent/" + axes + "(bytes)", static_cast<double>(bytes));
  add("experts/max_over_mean", "expert_max_over_mean");
  add("experts/idle", "experts_idle");
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
  add("skipped", "skipped");
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

namespace {
c10::DeviceAllocator* allocator_of(const std::string& device) {
  return device == "cuda"
             ? dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA))
             : nullptr;
}
}  // namespace

void reset_peak_memory(const std::string& device) {
  if (auto* allocator = allocator_of(device)) allocator->resetPeakStats(0);
}

double peak_memory_gib(const std::string& device) {
  constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
  if (auto* allocator = allocator_of(device))
    return static_cast<double>(allocator->getDeviceStats(0).allocated_bytes[0].peak) / kGiB;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0 / kGiB;
}

namespace {

// The text after "KEY:" in the first such line of a file of /proc.
std::string value_in(const std::filesystem::path& file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    const auto colon = line.find(':');
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    if (colon != std::string::npos && begin != std::string::npos) return line.substr(begin);
  }
  return "";
}

struct Peak {
  const char* name;  // part of what the driver says
  double tflops;
};
// The longer names first: the first that fits counts.
constexpr Peak kPeaks[] = {{"GB200", 2500},    {"B200", 2250}, {"B100", 1750},
                           {"H200 NVL", 836},  {"H200", 989},  {"H100 NVL", 836},
                           {"H100 PCIe", 756}, {"H100", 989},  {"A100", 312},
                           {"L40S", 362},      {"L4", 121}};

}  // namespace

std::string device_name(const std::string& device) {
  if (device == "cpu") return value_in("/proc/cpuinfo", "model name");
  std::set<std::string> names;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none))
    names.insert(value_in(gpu.path() / "information", "Model"));
  return names.size() == 1 ? *names.begin() : "";
}

double peak_tflops(const std::string& device_name) {
  for (const Peak& peak : kPeaks)
    if (device_name.find(peak.name) != std::string::npos) return peak.tflops;
  return 0;
}

}  // namespace moesh::train
