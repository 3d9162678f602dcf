#include "moesh/train/checkpointer.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <set>

#include "moesh/base/error.h"
#include "moesh/checkpoint/load.h"
#include "moesh/config/options.h"
#include "moesh/formats/file.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/toml.h"
#include "moesh/models/adapter.h"
#include "moesh/models/disk.h"
#include "moesh/train/build.h"

namespace moesh::train {

using checkpoint::Heartbeat;
using checkpoint::TensorPart;
using formats::Dtype;
namespace {

// `"key": value` of one config.json where the other has another value or none, of keys that change
// what is computed.
std::string own_values(const formats::JsonValue& a, const formats::JsonValue& b) {
  std::string text;
  for (const auto& [key, value] : a.as_object("config.json")) {
    const auto* other = b.find(key);
    if (key == "initializer_range" || key == "max_position_embeddings" ||
        key == "initializer_bias_range" || key == "router_aux_loss_coef" ||
        key == "num_nextn_predict_layers" || (other && *other == value))
      continue;
    std::string line = formats::to_json(value);
    std::erase(line, '\n');
    text += detail::concat(text.empty() ? "" : ", ", '"', key, "\": ", line);
  }
  return text;
}

// The keys of [model] that the folder has with other values, as one would set them.
std::string other_keys(const Config& config, const models::AnyConfig& theirs) {
  if (models::name(theirs) != config.model.name) return "model.name = " + models::name(theirs);
  Config other = config;
  other.model.architecture = theirs;
  std::string text;
  for (const auto& [key, value] : config::model_values(other)) {
    const auto ours = config::model_value(config, key);
    if (key == "model.init_std" || key == "model.init_bias_std" || key == "model.balance_loss" ||
        key == "model.max_sequence" || key == "model.num_mtp_layers" || ours == value)
      continue;
    text += detail::concat(text.empty() ? "" : ", ", key, " = ", formats::to_toml(value));
  }
  return text;
}

// The folder must hold the model that the run has.
void check_model(const std::filesystem::path& folder, const Config& config) {
  const auto theirs =
      models::config_of(checkpoint::read_config(folder), (folder / "config.json").string());
  const auto json = [](const models::AnyConfig& model) {
    return formats::parse_json(models::on_disk(model).config_json(Dtype::f32), "config.json");
  };
  const std::string others = other_keys(config, theirs);
  MOESH_CHECK(others.empty(), ErrorKind::config, "'", folder.string(),
              "' holds another model than the run asks for; set ", others,
              " as it is there, leave out all of [model] (and --model) to take the model of the "
              "folder, or choose another folder");
  // Properties that no key of [model] has: a variant of attention, a list of layers.
  const auto a = json(theirs), b = json(config.model.architecture);
  const std::string there = own_values(a, b), here = own_values(b, a);
  MOESH_CHECK(there.empty() && here.empty(), ErrorKind::config, "'", folder.string(),
              "' holds another model than the run asks for: its config.json has ", there,
              ", and that of the run ", here, "; choose another folder, or another model.size");
}

// The contents of a checkpoint besides the weights; nothing if another program wrote the folder.
std::optional<checkpoint::TensorFolder> state_of(const std::filesystem::path& folder) {
  // The rest may have been deleted, to keep only the weights.
  if (!formats::exists(folder / formats::kManifestFile) ||
      !formats::exists((folder / kStatePrefix).parent_path()))
    return std::nullopt;
  const auto manifest = formats::read_manifest(folder.string());
  if (!manifest.extra.contains(kOptimizerSteps)) return std::nullopt;  // converted weights
  return checkpoint::TensorFolder::of_checkpoint(folder, manifest, kStatePrefix);
}

// The expert biases of a checkpoint whose weights have no place for them.
void load_biases_apart(const std::filesystem::path& folder, models::Model& model,
                       const std::set<std::string>& among_weights) {
  const auto source = state_of(folder);
  if (!source) return;
  std::vector<TensorPart> parts;
  for (const TensorPart& part : weight_parts(model)) {
    const auto kept = master_name(part.name);
    if (among_weights.contains(part.name) || !source->tensors().contains(kept)) continue;
    parts.push_back(part);
    parts.back().name = kept;
  }
  const auto table = own_names(parts);
  checkpoint::Loader(*source, table).load(parts);
}

}  // namespace

void load_weights(const std::filesystem::path& folder, const Config& config, models::Model& model,
                  const Heartbeat& heartbeat) {
  check_model(folder, config);
  const auto source = checkpoint::TensorFolder::weights(folder);
  const auto names = on_disk(config);
  const auto table = names.table(checkpoint::find_layout(source, names));
  if (current_mesh().rank() == 0) checkpoint::tell_left_out(source, table);
  std::set<std::string> known;
  for (const auto& t : table.tensors)
    for (const auto& s : t.sources) known.insert(s.param);
  std::vector<TensorPart> parts;
  for (const auto& part : weight_parts(model))
    if (known.contains(part.name)) parts.push_back(part);
  const checkpoint::Loader loader(source, table);
  loader.load(parts, heartbeat, /*must_be_finite=*/true);
  std::vector<checkpoint::QuantizedPart> quantized;
  model.each_param([&](Stored& w, bool) {
    if (w.quantized) quantized.push_back({w.spec.name, w.spec.shape, w.quantized});
  });
  loader.load(quantized, heartbeat);
  load_biases_apart(folder, model, known);
}

void load_adapter(const std::filesystem::path& folder, const Config& config, models::Model& model,
                  const Heartbeat& heartbeat) {
  const auto source = checkpoint::TensorFolder::adapter(folder);
  const auto table = models::adapter_table(config.model.architecture, lora(config));
  checkpoint::check_names(source, table);
  checkpoint::Loader(source, table).load(saved_weights(model), heartbeat, /*must_be_finite=*/true);
}

bool keeps_bias_apart(const std::filesystem::path& folder) {
  const auto source = state_of(folder);
  const auto described = (folder / "config.json").string();
  if (!source || models::facts(models::config_of(checkpoint::read_config(folder), described))
                     .stores_expert_bias)
    return false;
  std::vector<TensorPart> biases;
  for (const auto& [name, found] : source->tensors())
    if (name.ends_with(master_name(".expert_bias")))
      biases.push_back(
          checkpoint::replicated_part(name, at::zeros(found.info->shape, at::kDouble), /*rank=*/0));
  const auto table = own_names(biases);
  checkpoint::Loader(*source, table).load(biases);
  return std::any_of(biases.begin(), biases.end(),
                     [](const TensorPart& p) { return p.value.any().item<bool>(); });
}

void load_initial_weights(const Config& config, models::Model& model,
                          const checkpoint::Heartbeat& heartbeat) {
  if (const auto& folder = config.checkpoint.initial_load; !folder.empty())
    load_weights(folder, config, model, heartbeat);
  if (const auto& folder = config.lora.adapter; !folder.empty())
    load_adapter(folder, config, model, heartbeat);
}

}  // namespace moesh::train
