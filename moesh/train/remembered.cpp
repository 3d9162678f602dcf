#include "moesh/train/checkpointer.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/config/options.h"
#include "moesh/formats/checksum.h"
#include "moesh/formats/file.h"
#include "moesh/formats/toml.h"
#include "moesh/train/build.h"

namespace moesh::train {

using config::find_option;
namespace {

// A file by its size and its two ends: enough to notice that it is another one, and quick.
std::string fingerprint(const std::string& path) {
  if (path.empty() || !formats::exists(path)) return "none";
  const formats::InputFile file(path);
  std::string text = std::to_string(file.size());
  std::vector<std::byte> block(std::min(file.size(), formats::kBlockBytes));
  for (const std::uint64_t begin : {std::uint64_t{0}, file.size() - block.size()}) {
    file.read(begin, block);
    text += "-" + formats::checksum_text(formats::hash_block(block));
  }
  return text;
}

// Token ids with an index are two files, named by either or by their prefix, and perhaps a mask.
std::string fingerprint_of_file(const std::string& path, const std::string& kind) {
  if (path.empty() || data::resolved_kind(kind, path) != "indexed") return fingerprint(path);
  const bool names_one = path.ends_with(".bin") || path.ends_with(".idx");
  const std::string prefix = names_one ? path.substr(0, path.size() - 4) : path;
  std::string text = fingerprint(prefix + ".bin") + "+" + fingerprint(prefix + ".idx");
  if (formats::exists(prefix + ".mask")) text += "+" + fingerprint(prefix + ".mask");
  return text;
}

std::string fingerprint_of_tokenizer(const std::string& path) {
  return fingerprint(formats::is_folder(path) ? path + "/tokenizer.json" : path);
}

std::string value_text(const config::Value& value) {
  const auto* text = std::get_if<std::string>(&value);
  return text ? *text : formats::to_toml(value);
}

}  // namespace

std::string fingerprint_of_data(const Config& config) {
  if (config.data.source.empty()) return fingerprint_of_file(config.data.path, config.data.kind);
  std::string text;
  for (const auto& source : config.data.source)
    text += (text.empty() ? "" : " ") + fingerprint_of_file(source.path, source.kind);
  return text;
}

std::vector<CheckpointSetting> remembered(const Config& config,
                                          const std::string& data_fingerprint) {
  std::vector<CheckpointSetting> all{{"data.fingerprint", data_fingerprint, true}};
  const auto add = [&](const char* name, bool gives_meaning) {
    all.push_back({name, value_text(find_option(name)->get(config)), gives_meaning});
  };
  for (const char* name :
       {"data.kind", "data.sequence_length", "data.seed", "data.shuffle", "data.packing"})
    add(name, true);
  all.push_back({"data.tokenizer", fingerprint_of_tokenizer(config.data.tokenizer), true});
  all.push_back({"data.document_mask", document_mask(config) ? "true" : "false", false});
  if (config.data.path.empty() && config.data.source.empty())
    add("data.synthetic_successors", true);
  for (std::size_t i = 0; i < config.data.source.size(); ++i) {
    const auto& source = config.data.source[i];
    const std::string entry = detail::concat("data.source.", i, ".");
    all.push_back({entry + "weight", formats::to_toml(source.weight), true});
    all.push_back({entry + "kind", data::resolved_kind(source.kind, source.path), true});
  }
  for (const char* name :
       {"data.path", "data.batch_size", "training.seed", "training.global_batch_size",
        "training.gradient_accumulation_steps", "moe.balance_loss_weight", "moe.balance_over",
        "moe.z_loss_weight", "training.mtp_loss_weight"})
    add(name, false);
  for (const char* name : kTrainedKeys)
    if (has_lora(config) || !std::string_view(name).starts_with("lora.")) add(name, false);
  if (has_lora(config))
    for (const char* name :
         {"lora.alpha", "lora.use_rslora", "lora.alpha_pattern", "lora.dropout", "lora.base"})
      add(name, false);
  return all;
}

}  // namespace moesh::train
