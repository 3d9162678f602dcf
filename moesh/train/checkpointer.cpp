#include "moesh/train/checkpointer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/base/timeline.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/comm/observers.h"
#include "moesh/comm/rank_status.h"
#include "moesh/config/merge.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/models/adapter.h"
#include "moesh/models/disk.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::train {

namespace {

using checkpoint::Heartbeat;
using checkpoint::TensorPart;
using formats::Dtype;
using Clock = std::chrono::steady_clock;

constexpr const char* kOptimizer = "optimizer";  // what the manifest calls them
constexpr const char* kTokensKey = "tokens";
constexpr auto kLayout = formats::ExpertLayout::per_expert;  // as Hugging Face has them

// 0 where the manifest does not have the key.
std::int64_t whole_number(const formats::Manifest& manifest, const char* key) {
  const auto found = manifest.extra.find(key);
  return found == manifest.extra.end() ? 0 : number_of<std::int64_t>(found->second).value_or(0);
}

// An error of the disk names the option that chooses the disk.
template <class F>
void naming_the_folder(const F& f) {
  try {
    f();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::storage && e.kind() != ErrorKind::config) throw;
    throw Error(e.kind(), detail::concat("checkpoint.folder: ", e.what()));
  }
}

}  // namespace

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

void Checkpointer::check_owned(const std::vector<TensorPart>& mine,
                               const std::vector<TensorPart>& all) {
  std::int64_t num_mine = 0, num_all = 0;
  for (const TensorPart& p : mine) num_mine += p.owned ? p.value.numel() : 0;
  for (const TensorPart& p : all) num_all += p.value.numel();
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
  const auto keeps_master = [&](const TensorPart& part) {
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
                .mesh = config::mesh_argument(mesh_shape(config_)),
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
  if (is_first && c.initial_load.empty() && !config_.model.folder.empty())
    log_info("beginning with new weights, and none of ", config_.model.folder);
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
      // A folder that cannot be read may be whole, and a whole one may not fit the run: only
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

void Checkpointer::check_same_are_trained(const checkpoint::TensorFolder& state,
                                          const formats::DiskTable& table,
                                          const formats::Manifest& manifest) const try {
  checkpoint::check_names(state, table);
} catch (const Error& e) {
  std::string changes;
  for (const auto& [key, now, gives_meaning] : remembered(config_, data_fingerprint_)) {
    const auto before = manifest.extra.find(key);
    if (std::ranges::find(kTrainedKeys, key) != std::end(kTrainedKeys) &&
        before != manifest.extra.end() && before->second != now)
      changes += detail::concat(changes.empty() ? "" : "; ", key, " was '", before->second,
                                "' and is '", now, "'");
  }
  if (changes.empty()) throw;
  const std::string folder = state.path().string();
  throw Error(ErrorKind::config,
              detail::concat("'", folder, "' was saved by a run that trained other tensors: ",
                             changes, "; set it back, or begin anew in another checkpoint.folder",
                             has_lora(config_) ? "" : ": checkpoint.initial_load=" + folder));
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
  const auto source = checkpoint::TensorFolder::of_checkpoint(folder, manifest, kStatePrefix);
  const auto is_kept = [&](const TensorPart& part) {
    return source.tensors().contains(master_name(part.name));
  };
  const auto table = own_names(whole_->state(is_kept));
  if (is_adapter) {
    check_same_are_trained(source, table, manifest);
    load_initial_weights(config_, model_, heartbeat);  // of what is frozen nothing is saved
    load_adapter(folder, config_, model_, heartbeat);
  } else {
    load_weights(folder, config_, model_, heartbeat);
    check_same_are_trained(source, table, manifest);
  }

  std::vector<at::Tensor> counts;
  for (auto* router : model_.routers())
    counts.push_back(at::empty_like(local(router->pending_counts())));
  checkpoint::Loader(source, table)
      .load(CheckpointParts(model_, optimizer_, counts).state(is_kept), heartbeat);

  const auto routers = model_.routers();
  for (std::size_t i = 0; i < routers.size(); ++i)
    routers[i]->set_pending_counts(constant(counts[i]));
  MOESH_CHECK(manifest.extra.contains(kOptimizerSteps), ErrorKind::data, "'", folder.string(),
              "': its manifest has no ", kOptimizerSteps, ": it was not saved by a training run");
  optimizer_.set_num_steps(whole_number(manifest, kOptimizerSteps));
  return {.step = manifest.step,
          .data_position = manifest.data_position,
          .num_skipped = whole_number(manifest, checkpoint::kSkippedSteps),
          .num_tokens = whole_number(manifest, kTokensKey)};
}

}  // namespace moesh::train
