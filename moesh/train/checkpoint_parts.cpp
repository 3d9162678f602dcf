#include "moesh/train/checkpointer.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/config/options.h"
#include "moesh/formats/checksum.h"
#include "moesh/formats/file.h"
#include "moesh/formats/toml.h"
#include "moesh/models/adapter.h"
#include "moesh/models/disk.h"
#include "moesh/spmd/ops.h"
#include "moesh/train/build.h"

namespace moesh::train {

using checkpoint::TensorPart;
namespace {

std::string counts_name(nn::Router& router) { return router.gate().name() + ".pending_counts"; }

// Tensors that every rank of a stage has whole: the first rank writes them.
TensorPart part_of_stage(const std::string& name, const at::Tensor& value) {
  return checkpoint::replicated_part(name, value, current_mesh().coordinate(kTokenAxes));
}

// A tensor of the optimizer's state to this rank: cut like its parameter, or whole on each rank
// that has the parameter, the first of which writes it.
TensorPart state_part(const optim::Optimizer::StateTensor& s) {
  if (s.is_sharded) return checkpoint::part_of(*s.param, s.name, s.value);
  const Axes all = s.param->cutting | s.param->storage | s.param->replicas;
  const bool is_first = !s.param->is_of_other_stage && current_mesh().coordinate(all) == 0;
  return checkpoint::replicated_part(s.name, s.value, is_first ? 0 : 1);
}

formats::DiskTensor as_it_is(const TensorPart& part) {
  auto tensor = formats::whole_tensor(part.name, part.name, part.shape);
  tensor.dtype = checkpoint::disk_dtype(part.value.scalar_type());
  return tensor;
}

}  // namespace

std::string master_name(const std::string& param) { return param + ".master"; }

std::vector<TensorPart> weight_parts(models::Model& model) {
  std::vector<TensorPart> parts;
  model.each_param([&](Stored& w, bool) {
    if (!w.quantized) parts.push_back(checkpoint::part_of(w));  // these are never saved
  });
  for (auto* router : model.routers())
    parts.push_back(
        part_of_stage(models::expert_bias_name(router->gate().name()), router->expert_bias()));
  return parts;
}

std::vector<TensorPart> saved_weights(models::Model& model) {
  std::vector<TensorPart> parts = weight_parts(model);
  const auto is_added = [](const TensorPart& p) { return models::is_of_lora(p.name); };
  if (std::any_of(parts.begin(), parts.end(), is_added))
    std::erase_if(parts, [&](const TensorPart& p) { return !is_added(p); });
  return parts;
}

formats::DiskTable own_names(const std::vector<TensorPart>& parts) {
  formats::DiskTable table;
  for (const auto& p : parts) table.tensors.push_back(as_it_is(p));
  return table;
}

CheckpointParts::CheckpointParts(models::Model& model, const optim::Optimizer& of_run,
                                 const std::vector<at::Tensor>& counts_E)
    : weights(saved_weights(model)) {
  for (const auto& s : of_run.state()) optimizer.push_back(state_part(s));
  const auto routers = model.routers();
  for (std::size_t i = 0; i < routers.size(); ++i)
    counts.push_back(part_of_stage(counts_name(*routers[i]), counts_E[i]));
}

CheckpointParts CheckpointParts::of_whole_model(const Config& config,
                                                const optim::Optimizer& of_stages) {
  const OneRankScope scope;
  const auto model = models::make_model(config.model.architecture,
                                        {.dtype = scalar_type(config),
                                         .device = at::kMeta,
                                         .lora = lora(config).of(config.model.architecture),
                                         .is_frozen = frozen(config).is_frozen()});
  optim::ParamList params;
  model->each_param([&](Stored& w, bool) { params.add(w); });
  const optim::Optimizer of_run(params, of_stages.choose());
  std::vector<at::Tensor> none;
  for (auto* router : model->routers()) none.push_back(local(router->pending_counts()));
  return {*model, of_run, none};
}

std::vector<TensorPart> CheckpointParts::state(
    const std::function<bool(const TensorPart&)>& keeps_master) const {
  std::vector<TensorPart> all = optimizer;
  for (TensorPart part : weights) {
    if (!keeps_master(part)) continue;
    part.name = master_name(part.name);
    all.push_back(part);
  }
  all.insert(all.end(), counts.begin(), counts.end());
  return all;
}

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
