#include "moesh/models/adapter.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/name.h"
#include "moesh/formats/pattern.h"
#include "moesh/formats/safetensors.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/disk.h"

namespace moesh::models {
namespace {

using formats::AdapterConfig;
using formats::DiskTensor;

constexpr std::string_view kGateUp = ".experts.gate_up_proj", kDown = ".experts.down_proj";

bool is_of_experts(std::string_view name) {
  return name.ends_with(kGateUp) || name.ends_with(kDown);
}

std::string without_end(const std::string& text, std::string_view end) {
  return text.substr(0, text.size() - end.size());
}

// The part of a name from its last `count`-th dot on.
std::string last_parts(const std::string& name, int count) {
  std::size_t begin = name.size();
  for (int i = 0; i < count && begin != std::string::npos && begin > 0; ++i)
    begin = name.rfind('.', begin - 1);
  return begin == std::string::npos ? name : name.substr(begin + 1);
}

bool ends_in(const std::string& name, const std::string& end) {
  return name == end || name.ends_with("." + end);
}

bool is_expression(const std::string& target) {
  return target.find_first_of("*+?()[]|\\^$") != std::string::npos;
}

bool matches(const std::string& target, const std::string& name) {
  if (target == kAllLinear || ends_in(name, target)) return true;
  return is_expression(target) && formats::Pattern("^(?:" + target + ")$").is_in(name);
}

// As it was written: errors of `matches` would show what it puts around it.
void check_expression(const std::string& target) try {
  if (is_expression(target)) formats::Pattern{target};
} catch (const Error& e) {
  throw Error(e.kind(), detail::concat("lora.targets: ", e.what()));
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    const auto first = part.find_first_not_of(' ');
    if (first != std::string::npos)
      parts.push_back(part.substr(first, part.find_last_not_of(' ') - first + 1));
  }
  return parts;
}

std::string with_commas_between(const std::set<std::string>& texts) {
  std::string all;
  for (const auto& t : texts) all += (all.empty() ? "" : ", ") + t;
  return all;
}

// PEFT takes modules of these names, in models of these types, for the experts that they once were,
// and passes the linear layers by: it finds those by their parameter.
bool is_found_as_parameter(const AnyConfig& config, const std::string& name) {
  static const std::set<std::string> renamed{"deepseek_v3", "glm4_moe",  "glm4_moe_lite",
                                             "olmoe",       "qwen3_moe", "qwen3_next"};
  const bool is_renamed =
      renamed.contains(std::visit([](const auto& c) { return c.kNames.model_type; }, config));
  const std::string last = last_parts(name, 1);
  return is_renamed && (last == "gate_proj" || last == "up_proj" || last == "down_proj");
}

// How PEFT calls the parameter of a target_parameters.
std::string parameter_name(const std::string& name) {
  return is_of_experts(name) ? name : name + ".weight";
}

// Ends of names that mean all of `wanted` and none of the others, or else `wanted` themselves.
std::vector<std::string> short_names(const std::set<std::string>& wanted,
                                     const std::vector<std::string>& all, int num_parts) {
  std::set<std::string> ends;
  for (const auto& name : wanted) ends.insert(last_parts(name, num_parts));
  for (const auto& name : all)
    for (const auto& end : ends)
      if (ends_in(name, end) && !wanted.contains(name)) return {wanted.begin(), wanted.end()};
  return {ends.begin(), ends.end()};
}

// PEFT wraps the experts once for each of their parameters, the first one innermost.
std::string wrapper_of(const std::string& name, const Lora& lora) {
  const bool is_gate_up = name.ends_with(kGateUp);
  const std::string layer = without_end(name, is_gate_up ? kGateUp : kDown) + ".experts";
  const bool is_inner = is_gate_up && lora.targets.contains(layer + ".down_proj");
  return layer + (is_inner ? ".base_layer" : "");
}

std::string on_disk_name(const std::string& wrapper, const char* part) {
  return formats::kAdapterPrefix + wrapper + part;
}

// A tensor that is all of one parameter, whose dimension p is dimension dims[p] of its view.
DiskTensor of_param(const std::string& name, const std::string& param,
                    std::vector<std::int64_t> view, std::vector<std::size_t> dims,
                    std::size_t num_rows) {
  DiskTensor t{.name = name, .shape = {1, 1}, .view = std::move(view), .sources = {}};
  for (std::size_t d = 0; d < t.view.size(); ++d) t.shape[d < num_rows ? 0 : 1] *= t.view[d];
  t.sources = {{.param = param,
                .offset = std::vector<std::int64_t>(dims.size(), 0),
                .dims = std::move(dims)}};
  return t;
}

// The matrices for the experts of a layer. A's rows are (expert, r), B's columns are (r, expert).
// Experts that lie in x out, and of which transformers does not say so, PEFT takes for out x in:
// there its A is our B, transposed, and the other way round.
struct ExpertOrder {
  bool is_swapped = false;      // Llama 4
  bool is_interleaved = false;  // GPT-OSS: gate and up by turns
};

DiskTensor expert_tensor(const std::string& wrapper, const Stored& w, ExpertOrder order) {
  const auto& s = w.spec.shape;
  const std::string& param = w.spec.name;
  const bool is_a = param.ends_with(nn::kLoraA);
  const std::string name =
      on_disk_name(wrapper, is_a != order.is_swapped ? nn::kLoraA : nn::kLoraB);
  if (is_a)  // [E, r, in]
    return order.is_swapped ? of_param(name, param, {s[2], s[1], s[0]}, {2, 1, 0}, 1)
                            : of_param(name, param, {s[0], s[1], s[2]}, {0, 1, 2}, 2);
  if (s.size() == 3)  // [E, out, r]
    return order.is_swapped ? of_param(name, param, {s[0], s[2], s[1]}, {0, 2, 1}, 2)
                            : of_param(name, param, {s[1], s[2], s[0]}, {2, 0, 1}, 1);
  // [E, 2, F, r]
  if (order.is_swapped) return of_param(name, param, {s[0], s[3], s[1], s[2]}, {0, 2, 3, 1}, 2);
  return order.is_interleaved ? of_param(name, param, {s[2], s[1], s[3], s[0]}, {3, 1, 0, 2}, 2)
                              : of_param(name, param, {s[1], s[2], s[3], s[0]}, {3, 0, 1, 2}, 2);
}

std::unique_ptr<Model> shapes(const AnyConfig& config, const Lora& lora) {
  const OneRankScope scope;
  return make_model(config, {.device = at::kMeta, .lora = lora.of(config)});
}

std::set<std::string> modules_of(const AnyConfig& config) {
  std::set<std::string> modules;
  shapes(config, {})->each_param([&](Stored& w, bool) {
    const std::string name = library_name(config, w.spec.name);
    modules.insert(name.substr(0, name.rfind('.')));
  });
  return modules;
}

// What PEFT has added a tensor of the file to.
std::string module_of(const std::string& tensor) {
  const std::string_view prefix = formats::kAdapterPrefix;
  const std::string name = tensor.starts_with(prefix) ? tensor.substr(prefix.size()) : tensor;
  return name.substr(0, std::min(name.find(".lora_"), name.find(".base_layer")));
}

// Every tensor of the file is A or B of a target, and both of each are there.
void check_whole(const AnyConfig& config, const formats::SafetensorsFile& file, const Lora& lora,
                 const std::filesystem::path& folder, const std::string& base) {
  std::set<std::string> missing, strange;
  for (const auto& t : file.header().tensors) strange.insert(t.name);
  for (const auto& [name, target] : lora.targets)
    for (const char* part : {nn::kLoraA, nn::kLoraB}) {
      const std::string wanted =
          on_disk_name(is_of_experts(name) ? wrapper_of(name, lora) : name, part);
      if (strange.erase(wanted) == 0) missing.insert(wanted);
    }
  MOESH_CHECK(missing.empty(), ErrorKind::data, "'", folder.string(), "' lacks ", missing.size(),
              " tensors, the first of them '", *missing.begin(),
              "': the file is not whole; take the adapter from where it was saved");
  const auto modules = strange.empty() ? std::set<std::string>{} : modules_of(config);
  const auto is_of_this_model = [&](const std::string& tensor) {
    return modules.contains(module_of(tensor));
  };
  MOESH_CHECK(
      strange.empty() || !std::all_of(strange.begin(), strange.end(), is_of_this_model),
      ErrorKind::data, "'", folder.string(), "' has LoRA on '", module_of(*strange.begin()),
      "'; moesh supports it on linear layers of attention and MLPs, and on gate_up_proj and "
      "down_proj of routed experts. Train the adapter without that module, or merge it into the "
      "model with PEFT (merge_and_unload) and use the merged model");
  MOESH_CHECK(strange.empty(), ErrorKind::data, "'", folder.string(), "' has ", strange.size(),
              " tensors that are for no weight of the model, the first of them '", *strange.begin(),
              "': it is the adapter of another model", base.empty() ? "" : " ('" + base + "')",
              "; name the model that it was trained for");
  MOESH_CHECK(lora.any(), ErrorKind::data, "'", folder.string(), "' has no tensors");
}

}  // namespace

std::vector<std::string> lora_names(const AnyConfig& config) {
  std::vector<std::string> names;
  const OneRankScope scope;
  make_model(config, {.device = at::kMeta, .lora = [&](const std::string& name) {
                        names.push_back(library_name(config, name));
                        return nn::no_lora(name);
                      }});
  return names;
}

Lora find_targets(const AnyConfig& config, const std::string& targets,
                  const AdapterConfig& values) {
  const auto names = lora_names(config);
  Lora lora{.use_rslora = values.use_rslora, .dropout = values.dropout};
  const auto asked = split(targets);
  MOESH_CHECK(!asked.empty(), ErrorKind::config,
              "lora.targets is empty; name weights, or set it to ", kAllLinear);
  std::set<std::string> known, chosen;
  const auto short_name = [](const std::string& name) {
    return last_parts(name, is_of_experts(name) ? 2 : 1);
  };
  for (const auto& name : names) known.insert(short_name(name));
  for (const auto& target : asked) {
    check_expression(target);
    bool is_found = false;
    for (const auto& name : names) {
      if (!matches(target, name)) continue;
      is_found = true;
      lora.targets[name] = {values.rank_of(name), values.alpha_of(name)};
    }
    MOESH_CHECK(is_found, ErrorKind::config, "lora.targets has '", target,
                "', and no weight that LoRA can add to has such a name; the model has ",
                with_commas_between(known), " (or ", kAllLinear, ": all of them)");
  }
  for (const auto& [name, target] : lora.targets) chosen.insert(short_name(name));
  const auto check_used = [&](const char* option, const auto& patterns) {
    for (const auto& [pattern, value] : patterns)
      MOESH_CHECK(
          std::any_of(lora.targets.begin(), lora.targets.end(),
                      [&](const auto& t) { return formats::matches_end(pattern, t.first); }),
          ErrorKind::config, option, " has '", pattern,
          "', which matches the end of no weight that LoRA adds to; these are ",
          with_commas_between(chosen));
  };
  check_used("lora.rank_pattern", values.rank_pattern);
  check_used("lora.alpha_pattern", values.alpha_pattern);
  return lora;
}

Lora read_adapter(const AnyConfig& config, const std::filesystem::path& folder) {
  formats::refuse_hub_name(folder.string());
  const auto config_file = folder / formats::kAdapterConfigFile;
  MOESH_CHECK(formats::exists(config_file) && formats::exists(folder / formats::kAdapterFile),
              ErrorKind::data, "'", folder.string(), "' does not have both ",
              formats::kAdapterConfigFile, " and ", formats::kAdapterFile,
              ": it is not a folder of a LoRA adapter", formats::checkpoints_instead(folder));
  const AdapterConfig values = formats::parse_adapter_config(
      formats::InputFile(config_file).read_all(1 << 20), config_file.string());
  const formats::SafetensorsFile file(folder / formats::kAdapterFile);
  Lora lora{.use_rslora = values.use_rslora, .dropout = values.dropout};
  const auto has = [&](const std::string& wrapper) {
    return file.header().find(on_disk_name(wrapper, nn::kLoraA)) != nullptr;
  };
  const auto is_asked = [&](const std::string& name) {
    return std::any_of(values.target_parameters.begin(), values.target_parameters.end(),
                       [&](const std::string& end) { return ends_in(name, end); });
  };
  for (const auto& name : lora_names(config)) {
    bool is_there = has(name);
    std::string key = name;
    if (is_of_experts(name)) {
      const bool is_gate_up = name.ends_with(kGateUp);
      const std::string layer = without_end(name, is_gate_up ? kGateUp : kDown) + ".experts";
      const bool has_both = has(layer + ".base_layer");
      is_there = has(layer) && (has_both || is_asked(name));
    } else if (is_asked(name + ".weight")) {
      key = name + ".weight";
    }
    if (is_there) lora.targets[name] = {values.rank_of(key), values.alpha_of(key)};
  }
  check_whole(config, file, lora, folder, values.base_model);
  return lora;
}

formats::DiskTable adapter_table(const AnyConfig& config, const Lora& lora) {
  const ExpertOrder order{.is_swapped = std::holds_alternative<Llama4Config>(config),
                          .is_interleaved = std::holds_alternative<GptOssConfig>(config)};
  formats::DiskTable table;
  shapes(config, lora)->each_param([&](Stored& w, bool) {
    const std::string& param = w.spec.name;
    if (!is_of_lora(param)) return;
    const char* part = param.ends_with(nn::kLoraA) ? nn::kLoraA : nn::kLoraB;
    const std::string name = library_name(config, without_end(param, part));
    table.tensors.push_back(
        is_of_experts(name) ? expert_tensor(wrapper_of(name, lora), w, order)
                            : formats::whole_tensor(on_disk_name(name, part), param, w.spec.shape));
  });
  return table;
}

std::map<std::string, formats::LoraTerm> added_to(const AnyConfig& config, const Lora& lora) {
  std::map<std::string, formats::LoraTerm> all;
  shapes(config, lora)->each_param([&](Stored& w, bool) {
    if (!w.spec.name.ends_with(nn::kLoraA)) return;
    const std::string name = without_end(w.spec.name, nn::kLoraA);
    formats::LoraTerm term{.a = w.spec.name,
                           .b = name + nn::kLoraB,
                           .scale = lora.scale(lora.targets.at(library_name(config, name)))};
    if (!is_of_experts(name)) {
      all[name + ".weight"] = term;
      return;
    }
    const bool is_gate_up = name.ends_with(kGateUp);
    const std::string experts = without_end(name, is_gate_up ? kGateUp : kDown) + ".experts";
    if (!is_gate_up) all[experts + ".w2"] = term;
    for (const auto& [part, half] : {std::pair{".w1", 0}, std::pair{".w3", 1}})
      if (is_gate_up) term.half = half, all[experts + part] = term;
  });
  return all;
}

std::string adapter_config_json(const AnyConfig& config, const Lora& lora,
                                const std::string& base) {
  const Lora::Target& first = lora.targets.begin()->second;
  AdapterConfig c{.rank = first.rank,
                  .alpha = first.alpha,
                  .use_rslora = lora.use_rslora,
                  .rank_pattern = {},
                  .alpha_pattern = {},
                  .target_modules = {},
                  .target_parameters = {},
                  .base_model = base};
  const auto is_parameter = [&](const std::string& name) {
    return is_of_experts(name) || is_found_as_parameter(config, name);
  };
  std::vector<std::string> all_modules, all_parameters;
  for (const auto& name : lora_names(config))
    is_parameter(name) ? all_parameters.push_back(parameter_name(name))
                       : all_modules.push_back(name);
  std::set<std::string> modules, parameters;
  for (const auto& [name, target] : lora.targets) {
    const std::string key = is_parameter(name) ? parameter_name(name) : name;
    (is_parameter(name) ? parameters : modules).insert(key);
    if (target.rank != c.rank) c.rank_pattern.emplace_back(key, target.rank);
    if (target.alpha != c.alpha) c.alpha_pattern.emplace_back(key, target.alpha);
  }
  c.target_modules = short_names(modules, all_modules, 1);
  c.target_parameters = short_names(parameters, all_parameters, 2);
  // PEFT opens no adapter that has both.
  if (c.target_parameters.empty()) c.dropout = lora.dropout;
  return formats::write_adapter_config(c);
}

double Lora::scale(const Target& target) const {
  const auto rank = static_cast<double>(target.rank);
  return target.alpha / (use_rslora ? std::sqrt(rank) : rank);
}

nn::LoraOf Lora::of(const AnyConfig& config) const {
  if (!any()) return nn::no_lora;
  return [lora = *this, config](const std::string& name) -> std::optional<nn::LoraConfig> {
    const auto found = lora.targets.find(library_name(config, name));
    if (found == lora.targets.end()) return std::nullopt;
    return nn::LoraConfig{.rank = found->second.rank,
                          .scale = lora.scale(found->second),
                          .zero_b = lora.zero_b,
                          .dropout = lora.dropout};
  };
}

bool is_of_lora(const std::string& param) {
  return param.ends_with(nn::kLoraA) || param.ends_with(nn::kLoraB);
}

}  // namespace moesh::models
