#pragma once
// Checkpoints of a run: their parts, the weights that a model begins with, the settings that a run
// must have in common with the one it resumes, and when to save.

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/part.h"
#include "moesh/checkpoint/save.h"
#include "moesh/config/config.h"
#include "moesh/models/model.h"
#include "moesh/optim/optimizer.h"
#include "moesh/train/build.h"

namespace moesh::train {

/// A weight that is kept beside the files of the model: they have no place for it, or not for all
/// of its bits.
std::string master_name(const std::string& param);

/// The parts of the weights and expert biases that this rank has.
std::vector<checkpoint::TensorPart> weight_parts(models::Model& model);
/// The ones that a checkpoint has: with LoRA only its matrices, else all.
std::vector<checkpoint::TensorPart> saved_weights(models::Model& model);

/// A table of tensors each of which is one part under its own name.
formats::DiskTable own_names(const std::vector<checkpoint::TensorPart>& parts);

struct CheckpointParts {
  std::vector<checkpoint::TensorPart> weights, optimizer,
      counts;  // `counts` are those of the routers

  CheckpointParts(models::Model& model, const optim::Optimizer& of_run,
                  const std::vector<at::Tensor>& counts_E);
  /// The parts of one rank with the whole model: names, shapes and types in the order of the model,
  /// without values. A checkpoint is the same whatever stages a rank has.
  static CheckpointParts of_whole_model(const config::Config& config,
                                        const optim::Optimizer& of_stages);

  /// All that is not saved as weights: also those of them which `keeps_master` says, under another
  /// name.
  std::vector<checkpoint::TensorPart> state(
      const std::function<bool(const checkpoint::TensorPart&)>& keeps_master) const;
};

// Weights that a model begins with: from a folder that moesh or others wrote, and what LoRA adds.

/// In a checkpoint, the files beside the weights; and the key of its manifest that only a training
/// run writes.
constexpr const char* kStatePrefix = "optimizer/state";
constexpr const char* kOptimizerSteps = "optimizer_steps";

/// Fills what this rank has of the parameters, and the expert biases, from checkpoint.initial_load,
/// a folder that moesh or others wrote, and what LoRA adds from lora.adapter; nothing where these
/// are empty. Throws Error (config) when the folder holds another model.
void load_initial_weights(const config::Config& config, models::Model& model,
                          const checkpoint::Heartbeat& heartbeat = {});

/// The same from a folder that the configuration need not name.
void load_weights(const std::filesystem::path& folder, const config::Config& config,
                  models::Model& model, const checkpoint::Heartbeat& heartbeat);
void load_adapter(const std::filesystem::path& folder, const config::Config& config,
                  models::Model& model, const checkpoint::Heartbeat& heartbeat);

/// Whether a folder is a checkpoint whose expert biases are not all zero and are not among its
/// weights, because the files of its model have no place for them: a program that reads only the
/// weights chooses other experts.
bool keeps_bias_apart(const std::filesystem::path& folder);

// Settings that a run must have in common with the run whose checkpoint it resumes.

/// A line of the manifest of a checkpoint.
struct CheckpointSetting {
  std::string key, value;
  bool gives_position_its_meaning;  // else the position in the data would be one in other data
};

/// Keys that say what is trained: a run with others has other state, and cannot resume.
inline constexpr const char* kTrainedKeys[] = {"training.freeze", "lora.rank", "lora.targets",
                                               "lora.rank_pattern"};

/// `data_fingerprint` is that of the data as the run began.
std::vector<CheckpointSetting> remembered(const config::Config& config,
                                          const std::string& data_fingerprint);

/// The files of the data by their sizes and ends: enough to notice that they are others, and quick.
std::string fingerprint_of_data(const config::Config& config);

// Checkpoints as the train loop sees them: where to begin, what to do after a step, and at the
// end.

/// How far a run has come.
struct Position {
  std::int64_t step = 0;           // optimizer steps taken
  std::int64_t data_position = 0;  // samples taken from the global order
  std::int64_t num_skipped = 0;    // steps in a row, up to this one, in which nothing moved
  std::int64_t num_tokens = 0;     // valid ones, of all steps
};

/// On every rank of the world, under its mesh. All its calls are collective.
class Checkpointer {
 public:
  /// `config` outlives it. `own_data`: what data the run has that the configuration does not name.
  Checkpointer(const Config& config, comm::Group& world, models::Model& model,
               optim::Optimizer& optimizer, std::string own_data = "");
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Loads the newest checkpoint of the run that is whole, or initial weights, or nothing. One that
  /// turns out to be damaged is reported, and the one before it is taken; where the system cannot
  /// read, it throws Error (storage).
  Position start();
  /// Saves where one is due. A failure of an asynchronous save is reported at the next one, and
  /// training goes on.
  void after_step(const Position& position);
  /// Saves what is not saved yet, and returns when that is done.
  void finish(const Position& position);
  /// How long the last save took that has ended, also where it was in the background.
  std::optional<double> save_seconds() const { return save_seconds_; }
  /// The newest checkpoint after which a step had finite gradients, of a run whose last steps had
  /// none; empty if there is none.
  std::filesystem::path last_healthy(const Position& position);

 private:
  /// The weights of the model, and everything else that a run resumes from.
  checkpoint::TensorSet weights(const CheckpointParts& mine);
  checkpoint::TensorSet state(const CheckpointParts& mine, const checkpoint::TensorSet& weights);
  /// Every number is saved, and by one rank.
  void check_owned(const std::vector<checkpoint::TensorPart>& mine,
                   const std::vector<checkpoint::TensorPart>& all);
  checkpoint::Snapshot snapshot(const Position& position);
  /// From the first look at the folder on, no other run works in it.
  void hold_folder();
  std::vector<std::int64_t> find_steps();
  void save(const Position& position, bool in_background);
  void wait();

  Position load_newest();
  /// Warns of what is another than in the run that saved, and throws Error (config) where the
  /// position in the data would mean nothing, unless checkpoint.accept_changes.
  void notice_changes(const std::filesystem::path& folder, const formats::Manifest& manifest) const;
  // The optimizer's state has the tensors of `table`; if not, the keys are named that explain it.
  void check_same_are_trained(const checkpoint::TensorFolder& state,
                              const formats::DiskTable& table,
                              const formats::Manifest& manifest) const;
  Position load_checkpoint(const std::filesystem::path& folder,
                           const checkpoint::Heartbeat& heartbeat);
  /// Nothing, and what is wrong, where the checkpoint is damaged.
  std::optional<Position> load_unless_damaged(const std::filesystem::path& folder,
                                              std::string& damage);
  /// The files that go into every checkpoint beside the model: those of the one that the run goes
  /// on from, or else of the folder which it begins with, or took its model from.
  void find_companions(const std::filesystem::path& resumed);
  /// Throws Error (storage) unless the disk has room for one checkpoint.
  void check_room(const Position& position);

  const Config& config_;
  comm::Group& world_;
  models::Model& model_;
  optim::Optimizer& optimizer_;
  std::string own_data_;
  std::unique_ptr<CheckpointParts> whole_;  // of the whole model, without values; null: not enabled
  checkpoint::SaveOptions options_;
  std::optional<checkpoint::FolderLock> lock_;  // of rank 0
  std::string data_fingerprint_;                // as the run began: what it has trained on
  std::optional<std::int64_t> last_saved_;
  // Only on rank 0, which writes them.
  std::map<std::string, std::string> companions_;  // by name
  std::string config_of_folder_;                   // config.json that they came with; may be empty
  // One save at a time is under way. Its collectives have a group of their own, on the host: they
  // cannot meet those of training.
  std::shared_ptr<comm::Group> background_group_;
  std::thread background_;
  std::string fault_;  // of the last save in the background
  std::optional<double> background_seconds_, save_seconds_;
};

}  // namespace moesh::train
