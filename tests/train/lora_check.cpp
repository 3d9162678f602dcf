#include "tests/train/lora_check.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>

#include "moesh/base/error.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/adapter.h"
#include "moesh/train/build.h"
#include "moesh/verify/verify.h"

namespace moesh::lora_check {
namespace {

constexpr const char *kA = ".lora_A.weight", *kB = ".lora_B.weight";

config::Config config_of(const std::string& model, bool has_lora) {
  std::vector<std::string> args{"--model=" + model + ":tiny", "--dtype=float64"};
  if (has_lora)
    args.insert(args.end(), {"--lora.rank=3", "--lora.alpha=5", "--lora.rank_pattern=down_proj=2",
                             "--lora.init_lora_weights=false"});
  return config::load_config(args, verify::verify_defaults(1));
}

double loss(models::Model& model, const config::Config& config) {
  const at::NoGradGuard no_grad;
  const auto data = train::open_dataset(config);
  const auto batches = train::step_batches(config, *data, current_mesh(), 0);
  return local(model.forward(batches[0], {}).cross_entropy).item<double>();
}

std::string stem(const std::string& name, const std::string& end) {
  return name.ends_with(end) ? name.substr(0, name.size() - end.size()) : "";
}

}  // namespace

std::string sum_complaint(const std::string& name) {
  const at::NoGradGuard no_grad;
  const OneRankScope scope;
  const config::Config config = config_of(name, true), of_plain = config_of(name, false);
  const auto model = train::make_model(config), plain = train::make_model(of_plain);
  std::map<std::string, at::Tensor> values, weights;
  std::string complaint;
  model->each_param([&](Stored& w, bool) {
    values[w.spec.name] = w.value.detach();
    const bool is_added = w.spec.name.find(".lora_") != std::string::npos;
    if (w.spec.trained != is_added)
      complaint = w.spec.name + (is_added ? " is not trained" : " is trained");
  });
  if (!complaint.empty()) return complaint;
  plain->each_param([&](Stored& w, bool) { weights[w.spec.name] = w.value.detach(); });
  int num_added = 0;
  for (const auto& [param, a] : values) {
    const std::string target = stem(param, kA);
    if (target.empty()) continue;
    ++num_added;
    const at::Tensor b = values.at(target + kB);
    const double factor = 5.0 / static_cast<double>(target.ends_with("down_proj") ? 2 : 3);
    if (const auto experts = stem(target, ".gate_up_proj"); !experts.empty()) {
      for (const auto& [part, half] : {std::pair{".w1", 0}, std::pair{".w3", 1}})
        weights.at(experts + part).add_(at::bmm(b.select(1, half), a), factor);
    } else if (target.ends_with(".experts.down_proj")) {
      weights.at(stem(target, ".down_proj") + ".w2").add_(at::bmm(b, a), factor);
    } else {
      weights.at(target + ".weight").add_(b.mm(a), factor);
    }
  }
  if (num_added < 4) return "LoRA adds to few weights";
  const double with = loss(*model, config), by_hand = loss(*plain, of_plain);
  return std::abs(with - by_hand) < 1e-11
             ? ""
             : detail::concat("the loss is ", with, ", and ", by_hand, " of w + alpha / r B A");
}

std::string order_complaint(const std::string& name) {
  const config::Config config = config_of(name, true);
  const models::Lora lora = config::lora(config);
  const bool is_swapped = name == "llama4", is_interleaved = name == "gpt_oss";
  const std::int64_t E = models::facts(config.model.architecture).num_experts;
  int num_experts = 0;
  for (const auto& t : models::adapter_table(config.model.architecture, lora).tensors) {
    const auto& source = t.sources.at(0);
    const std::string& param = source.param;
    if (!t.name.starts_with("base_model.model.model.layers.")) return t.name + ": its name";
    if (param.find(".experts.") == std::string::npos) continue;
    ++num_experts;
    const bool is_gate_up = param.find(".gate_up_proj") != std::string::npos,
               is_a = param.ends_with(kA);
    const std::string layer = name == "llama4"       ? ".feed_forward"
                              : name == "granitemoe" ? ".block_sparse_moe"
                                                     : ".mlp";
    const std::string wrapper = layer + (is_gate_up ? ".experts.base_layer" : ".experts");
    if (!t.name.ends_with(wrapper + (is_a != is_swapped ? kA : kB)))
      return t.name + ": of " + param;
    std::vector<std::int64_t> size;
    for (const auto dim : source.dims) size.push_back(t.view[dim]);
    const std::int64_t r = is_a ? size[1] : size.back();
    // Two numbers of the parameter [E, r, in], [E, out, r] or [E, 2, F, r].
    for (const std::int64_t k : {1, 2}) {
      std::vector<std::int64_t> at;
      for (std::size_t d = 0; d < size.size(); ++d)
        at.push_back(size[d] == 2 ? k - 1 : (k * (3 + static_cast<std::int64_t>(d))) % size[d]);
      std::vector<std::int64_t> in_view(t.view.size());
      for (std::size_t d = 0; d < at.size(); ++d) in_view[source.dims[d]] = at[d];
      std::int64_t linear = 0;
      for (std::size_t d = 0; d < in_view.size(); ++d) linear = linear * t.view[d] + in_view[d];
      const std::int64_t e = at[0], i = is_a ? at[1] : at.back();
      const std::int64_t wide = is_a             ? at[2]
                                : !is_gate_up    ? at[1]
                                : is_interleaved ? 2 * at[2] + at[1]
                                                 : at[1] * size[2] + at[2];
      const bool rows_are_experts = is_a != is_swapped;  // (e, i) along rows, (i, e) along columns
      const std::int64_t row = rows_are_experts ? e * r + i : wide,
                         column = rows_are_experts ? wide : i * E + e;
      if (linear / t.shape[1] != row || linear % t.shape[1] != column)
        return detail::concat(t.name, ": expert ", e, ", rank ", i, " at row ", linear / t.shape[1],
                              ", column ", linear % t.shape[1], ", not ", row, ", ", column);
    }
  }
  return num_experts >= 4 ? "" : "LoRA adds to few experts";
}

}  // namespace moesh::lora_check
