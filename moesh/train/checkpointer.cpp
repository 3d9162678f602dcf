#include "moesh/train/checkpointer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <set>
#include <sstream>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/checkpoint/inspect.h"
#include "moesh/checkpoint/load.h"
#include "moesh/comm/flight.h"
#include "moesh/comm/roll.h"
#include "moesh/config/options.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/adapter.h"
#include "moesh/models/disk.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::train {

using config::Degree;
using config::degrees;
using config::find_option;
using config::Option;
using config::options;
namespace {

using checkpoint::Heartbeat;
using checkpoint::Part;
using formats::Dtype;
using Clock = std::chrono::steady_clock;

constexpr const char* kStatePrefix = "optimizer/state";
constexpr const char* kOptimizer = "optimizer";  // what the manifest calls them
constexpr const char* kOptimizerSteps = "optimizer_steps";
constexpr const char* kTokensKey = "tokens";
constexpr auto kLayout = formats::ExpertLayout::per_expert;  // as Hugging Face has them

std::string master_name(const std::string& param) { return param + ".master"; }
std::string counts_name(nn::Router& router) { return router.gate().name() + ".pending_counts"; }

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::int64_t whole_number(const std::string& text) {
  std::int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

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

std::string fingerprint_of_data(const Config& config) {
  if (config.data.source.empty()) return fingerprint_of_file(config.data.path, config.data.kind);
  std::string text;
  for (const auto& source : config.data.source)
    text += (text.empty() ? "" : " ") + fingerprint_of_file(source.path, source.kind);
  return text;
}

std::string value_text(const config::Value& value) {
  const auto* text = std::get_if<std::string>(&value);
  return text ? *text : formats::to_toml(value);
}

// What a run that goes on must have in common with the one before. Without the first kind, the
// position in the data would be one in other data.
struct Remembered {
  std::string key, value;
  bool gives_position_its_meaning;
};
std::vector<Remembered> remembered(const Config& config, const std::string& data_fingerprint) {
  std::vector<Remembered> all{{"data.fingerprint", data_fingerprint, true}};
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
  for (const char* name : {"data.path", "data.batch_size", "training.seed",
                           "training.global_batch_size", "training.gradient_accumulation_steps",
                           "moe.balance_loss_weight", "moe.balance_over", "moe.z_loss_weight"})
    add(name, false);
  if (has_lora(config))
    for (const char* name : {"lora.alpha", "lora.use_rslora", "lora.alpha_pattern"})
      add(name, false);
  return all;
}

// As --mesh takes it.
std::string mesh_text(const Config& config) {
  std::string text;
  for (const Degree& d : degrees())
    if (const auto size = std::get<std::int64_t>(find_option(d.option)->get(config)); size != 1)
      text += detail::concat(text.empty() ? "" : ",", d.axis, "=", size);
  return text.empty() ? "one rank" : text;
}

// What every rank of a stage has whole: the first of them writes it.
Part part_of_stage(const std::string& name, const at::Tensor& value) {
  return checkpoint::replicated_part(name, value, current_mesh().coordinate(kTokenAxes));
}

// What the weights, and their expert biases, are to this rank.
std::vector<Part> weight_parts(models::Model& model) {
  std::vector<Part> parts;
  model.each_param([&](Stored& w, bool) { parts.push_back(checkpoint::part_of(w)); });
  for (auto* router : model.routers())
    parts.push_back(
        part_of_stage(models::expert_bias_name(router->gate().name()), router->expert_bias()));
  return parts;
}

// What a checkpoint has of them: with LoRA only its matrices, else all.
std::vector<Part> saved_weights(models::Model& model) {
  std::vector<Part> parts = weight_parts(model);
  const auto is_added = [](const Part& p) { return models::is_of_lora(p.name); };
  if (std::any_of(parts.begin(), parts.end(), is_added))
    std::erase_if(parts, [&](const Part& p) { return !is_added(p); });
  return parts;
}

// A tensor of the optimizer's state to this rank: cut like its parameter, or whole on each rank
// that has the parameter, the first of which writes it.
Part state_part(const optim::Optimizer::State& s) {
  if (s.is_sharded) return checkpoint::part_of(*s.param, s.name, s.value);
  const Axes all = s.param->cutting | s.param->storage | s.param->replicas;
  const bool is_first = !s.param->is_of_other_stage && current_mesh().coordinate(all) == 0;
  return checkpoint::replicated_part(s.name, s.value, is_first ? 0 : 1);
}

formats::DiskTensor as_it_is(const Part& part) {
  auto tensor = formats::whole_tensor(part.name, part.name, part.shape);
  tensor.dtype = checkpoint::disk_dtype(part.value.scalar_type());
  return tensor;
}

// A table of tensors each of which is one part under its own name.
formats::DiskTable own_names(const std::vector<Part>& parts) {
  formats::DiskTable table;
  for (const auto& p : parts) table.tensors.push_back(as_it_is(p));
  return table;
}

// `"key": value` of one config.json where the other has another value or none, of keys that change
// what is computed.
std::string own_values(const formats::JsonValue& a, const formats::JsonValue& b) {
  std::string text;
  for (const auto& [key, value] : a.as_object("config.json")) {
    const auto* other = b.find(key);
    if (key == "initializer_range" || key == "max_position_embeddings" ||
        key == "initializer_bias_range" || key == "router_aux_loss_coef" ||
        (other && *other == value))
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
        key == "model.max_sequence" || ours == value)
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
              " as it has it, leave out all of [model] (and --model) to take the model of the "
              "folder, or choose another folder");
  // What no key of [model] says: a variant of attention, a list of layers.
  const auto a = json(theirs), b = json(config.model.architecture);
  const std::string there = own_values(a, b), here = own_values(b, a);
  MOESH_CHECK(there.empty() && here.empty(), ErrorKind::config, "'", folder.string(),
              "' holds another model than the run asks for: its config.json has ", there,
              ", and that of the run ", here, "; choose another folder, or another model.size");
}

// What a checkpoint holds besides the weights; nothing where others wrote the folder.
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
  std::vector<Part> parts;
  for (const Part& part : weight_parts(model)) {
    const auto kept = master_name(part.name);
    if (among_weights.contains(part.name) || !source->tensors().contains(kept)) continue;
    parts.push_back(part);
    parts.back().name = kept;
  }
  const auto table = own_names(parts);
  checkpoint::Loader(*source, table).load(parts);
}

// What a disk refuses is told with the option that chooses the disk.
template <class F>
void naming_the_folder(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::storage && e.kind() != ErrorKind::config) throw;
    throw Error(e.kind(), detail::concat("checkpoint.folder: ", e.what()));
  }
}

void load_weights(const std::filesystem::path& folder, const Config& config, models::Model& model,
                  const Heartbeat& heartbeat) {
  check_model(folder, config);
  const auto source = checkpoint::TensorFolder::weights(folder);
  const auto names = on_disk(config);
  const auto table = names.table(checkpoint::find_layout(source, names));
  std::set<std::string> known;
  for (const auto& t : table.tensors)
    for (const auto& s : t.sources) known.insert(s.param);
  std::vector<Part> parts;
  for (const auto& part : weight_parts(model))
    if (known.contains(part.name)) parts.push_back(part);
  checkpoint::Loader(source, table).load(parts, heartbeat, /*must_be_finite=*/true);
  load_biases_apart(folder, model, known);
}

void load_adapter(const std::filesystem::path& folder, const Config& config, models::Model& model,
                  const Heartbeat& heartbeat) {
  const auto source = checkpoint::TensorFolder::adapter(folder);
  const auto table = models::adapter_table(config.model.architecture, lora(config));
  checkpoint::check_names(source, table);
  checkpoint::Loader(source, table).load(saved_weights(model), heartbeat, /*must_be_finite=*/true);
}

}  // namespace

// What a checkpoint is made of, by name.
struct CheckpointParts {
  std::vector<Part> weights, optimizer, counts;  // `counts` are those of the routers

  CheckpointParts(models::Model& model, const optim::Optimizer& of_run,
                  const std::vector<at::Tensor>& counts_E)
      : weights(saved_weights(model)) {
    for (const auto& s : of_run.state()) optimizer.push_back(state_part(s));
    const auto routers = model.routers();
    for (std::size_t i = 0; i < routers.size(); ++i)
      counts.push_back(part_of_stage(counts_name(*routers[i]), counts_E[i]));
  }

  // The parts of one rank with the whole model: names, shapes and types in the order of the model,
  // without values. A checkpoint is the same whatever stages a rank has.
  static CheckpointParts of_whole_model(const Config& config, const optim::Optimizer& of_stages) {
    const OneRankScope scope;
    const auto model =
        models::make_model(config.model.architecture, {.dtype = scalar_type(config),
                                                       .device = at::kMeta,
                                                       .lora = lora(config).of(),
                                                       .is_frozen = frozen(config).is_frozen()});
    optim::ParamList params;
    model->each_param([&](Stored& w, bool) { params.add(w); });
    const optim::Optimizer of_run(params, of_stages.choose());
    std::vector<at::Tensor> none;
    for (auto* router : model->routers()) none.push_back(local(router->pending_counts()));
    return {*model, of_run, none};
  }

  // All that is not saved as weights: also those of them which `keeps_master` says, under another
  // name.
  std::vector<Part> state(const std::function<bool(const Part&)>& keeps_master) const {
    std::vector<Part> all = optimizer;
    for (Part part : weights) {
      if (!keeps_master(part)) continue;
      part.name = master_name(part.name);
      all.push_back(part);
    }
    all.insert(all.end(), counts.begin(), counts.end());
    return all;
  }
};

bool keeps_bias_apart(const std::filesystem::path& folder) {
  const auto source = state_of(folder);
  const auto described = (folder / "config.json").string();
  if (!source || models::facts(models::config_of(checkpoint::read_config(folder), described))
                     .stores_expert_bias)
    return false;
  std::vector<Part> biases;
  for (const auto& [name, found] : source->tensors())
    if (name.ends_with(master_name(".expert_bias")))
      biases.push_back(
          checkpoint::replicated_part(name, at::zeros(found.info->shape, at::kDouble), /*rank=*/0));
  const auto table = own_names(biases);
  checkpoint::Loader(*source, table).load(biases);
  return std::any_of(biases.begin(), biases.end(),
                     [](const Part& p) { return p.value.any().item<bool>(); });
}

Checkpointer::Checkpointer(const Config& config, comm::Group& world, models::Model& model,
                           optim::Optimizer& optimizer, std::string own_data)
    : config_(config),
      world_(world),
      model_(model),
      optimizer_(optimizer),
      own_data_(std::move(own_data)) {
  const auto& c = config.checkpoint;
  options_ = {.folder = c.folder,
              .max_shard_size = static_cast<std::uint64_t>(c.max_shard_size),
              .keep_latest = c.keep_latest_k};
  if (!c.enable) return;
  whole_ = std::make_unique<CheckpointParts>(CheckpointParts::of_whole_model(config, optimizer));
  if (c.async) background_group_ = world.background("checkpoint");
}

Checkpointer::~Checkpointer() {
  if (background_.joinable()) background_.join();
}

void Checkpointer::check_owned(const std::vector<Part>& mine, const std::vector<Part>& all) {
  std::int64_t num_mine = 0, num_all = 0;
  for (const Part& p : mine) num_mine += p.owned ? p.value.numel() : 0;
  for (const Part& p : all) num_all += p.value.numel();
  const at::Tensor sum = world_.all_reduce(at::full({1}, num_mine, at::kLong).to(device(config_)));
  const auto num_owned = sum.item<std::int64_t>();
  MOESH_CHECK(num_owned == num_all, "the ranks would save ", num_owned, " numbers, and there are ",
              num_all);
}

checkpoint::TensorSet Checkpointer::weights(const CheckpointParts& mine) {
  checkpoint::TensorSet set{.prefix = "model"};
  if (has_lora(config_)) {
    set.prefix = formats::kAdapterFile;
    set.tensors = models::adapter_table(config_.model.architecture, lora(config_)).tensors;
  } else {
    set.tensors = on_disk(config_).table(kLayout).tensors;
  }
  set.parts = mine.weights;
  check_owned(set.parts, whole_->weights);
  const auto& wanted = config_.checkpoint.export_dtype;
  const auto parts = checkpoint::by_name(whole_->weights);
  for (auto& t : set.tensors) {
    const auto own = checkpoint::disk_dtype(parts.at(t.sources.front().param)->value.scalar_type());
    if (!t.dtype)
      t.dtype = wanted == "bfloat16" ? Dtype::bf16 : wanted == "float32" ? Dtype::f32 : own;
  }
  return set;
}

// The optimizer's tensors; counts; and of the weights what the files of the model do not hold, or
// not with all bits.
checkpoint::TensorSet Checkpointer::state(const CheckpointParts& mine,
                                          const checkpoint::TensorSet& weights) {
  std::map<std::string, Dtype> on_disk;
  for (const auto& t : weights.tensors)
    for (const auto& source : t.sources) on_disk[source.param] = *t.dtype;
  const auto keeps_master = [&](const Part& part) {
    const auto found = on_disk.find(part.name);
    return found == on_disk.end() ||
           formats::size_of(found->second) < static_cast<std::uint64_t>(part.value.element_size());
  };
  checkpoint::TensorSet set{.prefix = kStatePrefix};
  set.parts = mine.state(keeps_master);
  const auto all = whole_->state(keeps_master);
  check_owned(set.parts, all);
  set.tensors = own_names(all).tensors;
  return set;
}

checkpoint::Snapshot Checkpointer::snapshot(const Position& position) {
  checkpoint::Snapshot s;
  std::vector<at::Tensor> counts;
  for (auto* router : model_.routers())
    counts.push_back(whole(all_reduce<kTokenAxes>(router->pending_counts())));
  const CheckpointParts mine(model_, optimizer_, counts);
  s.sets.push_back(weights(mine));
  s.sets.push_back(state(mine, s.sets[0]));
  s.texts = companions_;
  if (has_lora(config_)) {
    const std::string& base = config_.checkpoint.initial_load;
    s.texts[formats::kAdapterConfigFile] =
        models::adapter_config_json(config_.model.architecture, lora(config_),
                                    base.empty() ? "" : std::filesystem::absolute(base).string());
  } else {
    std::string& config_json = s.texts["config.json"];
    config_json = on_disk(config_).config_json(s.sets[0].tensors.front().dtype.value());
    if (!config_of_folder_.empty())
      config_json = checkpoint::with_token_ids(config_json, config_of_folder_);
  }
  s.texts["run.toml"] = print_config(config_);
  s.manifest = {.step = position.step,
                .model = config_.model.name,
                .size = config_.model.size,
                .mesh = mesh_text(config_),
                .seed = config_.training.seed,
                .data_position = position.data_position,
                .extra = {{kOptimizer, config_.optimizer.name},
                          {kOptimizerSteps, std::to_string(optimizer_.num_steps())},
                          {"dtype", config_.training.dtype}}};
  for (const auto& [key, value, gives_meaning] : remembered(config_, data_fingerprint_))
    s.manifest.extra[key] = value;
  s.manifest.extra[kTokensKey] = std::to_string(position.num_tokens);
  if (position.num_skipped > 0)
    s.manifest.extra[checkpoint::kSkippedSteps] = std::to_string(position.num_skipped);
  return s;
}

void Checkpointer::hold_folder() {
  checkpoint::together(world_, [&] {
    if (world_.rank() != 0 || lock_) return;
    naming_the_folder([&] { lock_.emplace(options_.folder); });
    data_fingerprint_ = own_data_.empty() ? fingerprint_of_data(config_) : own_data_;
  });
  data_fingerprint_ = checkpoint::text_of_first(world_, data_fingerprint_);
}

void Checkpointer::save(const Position& position, bool in_background) {
  wait();
  hold_folder();
  const auto start = Clock::now();
  const bool is_first = world_.rank() == 0;
  checkpoint::Snapshot now = snapshot(position);
  const checkpoint::SaveOptions options = options_;
  last_saved_ = position.step;
  options_.known.insert(position.step);
  if (!in_background) {
    std::filesystem::path path;
    naming_the_folder([&] { path = checkpoint::save(now, options, world_); });
    options_.damaged.erase(position.step);
    save_seconds_ = seconds_since(start);
    if (is_first) log_info("saved ", path.string(), " in ", seconds_since(start), " s");
    return;
  }
  background_ = std::thread([this, start, is_first, options, copy = checkpoint::copied(now),
                             flight = comm::flight::current()] {
    set_log_rank(world_.rank());
    comm::flight::use(flight);
    try {
      const auto path = checkpoint::save(copy, options, *background_group_);
      if (is_first)
        log_info("saved ", path.string(), " in ", seconds_since(start), " s, in the background");
      background_seconds_ = seconds_since(start);
    } catch (...) {
      fault_ = detail::concat("step ", copy.manifest.step,
                              " was not saved: ", comm::text_of(std::current_exception()));
    }
  });
  if (is_first)
    log_info("copied step ", position.step, " for saving in ", seconds_since(start), " s");
}

void Checkpointer::wait() {
  if (background_.joinable()) background_.join();
  if (background_seconds_) save_seconds_ = std::exchange(background_seconds_, std::nullopt);
  if (fault_.empty()) return;
  if (world_.rank() == 0) log_warn(fault_, "; training continues");
  fault_.clear();
  last_saved_.reset();
}

void Checkpointer::after_step(const Position& position) {
  const auto& c = config_.checkpoint;
  if (c.enable && position.step % c.interval == 0) save(position, c.async);
}

void Checkpointer::finish(const Position& position) {
  wait();
  if (config_.checkpoint.enable && last_saved_ != position.step) save(position, false);
}

std::vector<std::int64_t> Checkpointer::find_steps() {
  std::string found;  // by rank 0, so that all ranks try the same ones
  checkpoint::together(world_, [&] {
    if (world_.rank() != 0) return;
    for (const auto step : checkpoint::saved_steps(options_.folder))
      found += detail::concat(step, " ");
  });
  std::istringstream stream(checkpoint::text_of_first(world_, found));
  std::vector<std::int64_t> steps;
  for (std::int64_t step = 0; stream >> step;) steps.push_back(step);
  return steps;
}

Position Checkpointer::start() {
  const Position position = load_newest();
  // A run that has nothing left to do saves nothing.
  if (config_.checkpoint.enable && position.step < config_.training.steps) check_room(position);
  return position;
}

void Checkpointer::check_room(const Position& position) {
  const auto needed = checkpoint::planned_bytes(snapshot(position), options_);
  checkpoint::together(world_, [&] {
    std::uint64_t room = 0;
    if (world_.rank() != 0 || formats::file_system().free_bytes(options_.folder, room) != 0) return;
    MOESH_CHECK(needed <= room, ErrorKind::storage, "a checkpoint of this run has ", needed,
                " bytes, and checkpoint.folder '", options_.folder.string(), "' has room for ",
                room, "; make room, or choose a folder on another disk");
  });
}

std::filesystem::path Checkpointer::last_healthy(const Position& position) {
  wait();
  std::int64_t healthy = -1;
  if (config_.checkpoint.enable)
    for (const auto step : find_steps())
      if (step < position.step - position.num_skipped) healthy = step;
  return healthy < 0 ? std::filesystem::path() : options_.folder / checkpoint::step_name(healthy);
}

Position Checkpointer::load_newest() {
  const auto& c = config_.checkpoint;
  const bool is_first = world_.rank() == 0;
  if (c.enable) {
    hold_folder();
    const auto steps = find_steps();
    // Later steps of another run would be the newest for a run that resumes from here.
    MOESH_CHECK(c.resume || steps.empty(), ErrorKind::config,
                "checkpoint.resume is false, and checkpoint.folder '", options_.folder.string(),
                "' holds checkpoints of another run; choose another folder, or move them away");
    options_.known = {steps.begin(), steps.end()};
    std::string faults;
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      const auto folder = options_.folder / checkpoint::step_name(*step);
      std::string damage;
      if (const auto position = load_unless_damaged(folder, damage)) {
        last_saved_ = position->step;
        find_companions(folder);
        if (is_first) log_info("going on from ", folder.string());
        return *position;
      }
      options_.damaged.insert(*step);
      if (is_first) log_warn("checkpoint ", folder.string(), " is not whole: ", damage);
      faults += detail::concat(faults.empty() ? "" : "; ", folder.string(), ": ", damage);
    }
    MOESH_CHECK(steps.empty(), ErrorKind::data, "no checkpoint in '", options_.folder.string(),
                "' is whole (", faults,
                "); to begin anew, move them away or choose another checkpoint.folder");
  }
  find_companions({});
  checkpoint::together(world_, [&](const Heartbeat& heartbeat) {
    load_initial_weights(config_, model_, heartbeat);
  });
  for (const std::string& folder : {c.initial_load, config_.lora.adapter})
    if (is_first && !folder.empty()) log_info("beginning with the weights of ", folder);
  return {};
}

void Checkpointer::find_companions(const std::filesystem::path& resumed) {
  if (!config_.checkpoint.enable) return;
  checkpoint::together(world_, [&] {
    if (world_.rank() != 0) return;
    for (const std::filesystem::path& folder :
         {resumed, std::filesystem::path(config_.checkpoint.initial_load),
          std::filesystem::path(config_.model.folder)}) {
      if (folder.empty()) continue;
      if (companions_.empty()) companions_ = checkpoint::read_companions(folder);
      if (config_of_folder_.empty() && formats::exists(folder / "config.json"))
        config_of_folder_ = checkpoint::read_config(folder);
    }
  });
}

std::optional<Position> Checkpointer::load_unless_damaged(const std::filesystem::path& folder,
                                                          std::string& damage) {
  for (const bool is_second : {false, true}) try {
      Position position;
      checkpoint::together(world_, [&](const Heartbeat& heartbeat) {
        position = load_checkpoint(folder, heartbeat);
      });
      return position;
    } catch (const Error& e) {
      // What cannot be read may be whole, and what is whole may not be what the run needs: only
      // files that are read a second time with other bytes than were written make a run go back.
      if (e.kind() != ErrorKind::data) throw;
      damage = checkpoint::damage_in(folder, world_);
      if (!damage.empty()) return std::nullopt;
      if (is_second) throw;
      if (world_.rank() == 0)
        log_warn(e.what(), "; every file is as it was written, so it is read once more");
    }
  return std::nullopt;
}

void load_initial_weights(const Config& config, models::Model& model,
                          const checkpoint::Heartbeat& heartbeat) {
  if (const auto& folder = config.checkpoint.initial_load; !folder.empty())
    load_weights(folder, config, model, heartbeat);
  if (const auto& folder = config.lora.adapter; !folder.empty())
    load_adapter(folder, config, model, heartbeat);
}

void Checkpointer::notice_changes(const std::filesystem::path& folder,
                                  const formats::Manifest& manifest) const {
  std::string changes, fatal;
  for (const auto& [key, now, gives_meaning] : remembered(config_, data_fingerprint_)) {
    const auto before = manifest.extra.find(key);
    if (before == manifest.extra.end() || before->second == now) continue;
    const auto text = detail::concat(key, " was ", before->second, " and is ", now);
    changes += (changes.empty() ? "" : "; ") + text;
    if (gives_meaning) fatal += (fatal.empty() ? "" : "; ") + text;
  }
  MOESH_CHECK(fatal.empty() || config_.checkpoint.accept_changes, ErrorKind::config, "'",
              folder.string(), "' was saved by a run on other data: ", fatal,
              ". Its position there means nothing here; set them back, or resume anyway with "
              "--checkpoint.accept_changes");
  if (!changes.empty() && world_.rank() == 0)
    log_warn("the run resumes with other values than ", folder.string(),
             " was saved with: ", changes);
}

Position Checkpointer::load_checkpoint(const std::filesystem::path& folder,
                                       const Heartbeat& heartbeat) {
  const at::NoGradGuard no_grad;
  const formats::Manifest manifest = checkpoint::read_intact_manifest(folder);
  MOESH_CHECK(folder.filename() == checkpoint::step_name(manifest.step), ErrorKind::data, "'",
              folder.string(), "' holds step ", manifest.step,
              ": it was copied or renamed; give it its own name, or move it away");
  const auto optimizer = manifest.extra.find(kOptimizer);
  MOESH_CHECK(
      optimizer == manifest.extra.end() || optimizer->second == config_.optimizer.name,
      ErrorKind::config, "'", folder.string(), "' was saved with optimizer ", optimizer->second,
      ", and ", describe_option(config_, "optimizer.name"), "; set optimizer.name to ",
      optimizer->second,
      ", or begin anew with these weights in another checkpoint.folder: checkpoint.initial_load=",
      folder.string());
  notice_changes(folder, manifest);
  const bool is_adapter = formats::exists(folder / formats::kAdapterConfigFile);
  MOESH_CHECK(is_adapter == has_lora(config_), ErrorKind::config, "'", folder.string(),
              is_adapter
                  ? "' was saved by a run with LoRA, and this one has none; set lora.rank as it was"
                  : "' was saved by a run without LoRA, and this one has it; leave out [lora]",
              ", or choose another checkpoint.folder");
  if (is_adapter) {
    load_initial_weights(config_, model_, heartbeat);  // of what is frozen nothing is saved
    load_adapter(folder, config_, model_, heartbeat);
  } else {
    load_weights(folder, config_, model_, heartbeat);
  }

  const auto source = checkpoint::TensorFolder::of_checkpoint(folder, manifest, kStatePrefix);
  std::vector<at::Tensor> counts;
  for (auto* router : model_.routers())
    counts.push_back(at::empty_like(local(router->pending_counts())));
  const auto is_kept = [&](const Part& part) {
    return source.tensors().contains(master_name(part.name));
  };
  const auto table = own_names(whole_->state(is_kept));
  checkpoint::check_names(source, table);
  checkpoint::Loader(source, table)
      .load(CheckpointParts(model_, optimizer_, counts).state(is_kept), heartbeat);

  const auto routers = model_.routers();
  for (std::size_t i = 0; i < routers.size(); ++i)
    routers[i]->set_pending_counts(constant(counts[i]));
  const auto steps = manifest.extra.find(kOptimizerSteps);
  MOESH_CHECK(steps != manifest.extra.end(), ErrorKind::data, "'", folder.string(),
              "': its manifest has no ", kOptimizerSteps, ": it was not saved by a training run");
  optimizer_.set_num_steps(whole_number(steps->second));
  const auto skipped = manifest.extra.find(checkpoint::kSkippedSteps);
  const auto tokens = manifest.extra.find(kTokensKey);
  return {.step = manifest.step,
          .data_position = manifest.data_position,
          .num_skipped = skipped == manifest.extra.end() ? 0 : whole_number(skipped->second),
          .num_tokens = tokens == manifest.extra.end() ? 0 : whole_number(tokens->second)};
}

}  // namespace moesh::train
