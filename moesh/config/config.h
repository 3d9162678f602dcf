#pragma once
// The configuration of a run: one closed object, from which everything that trains, verifies or
// estimates is built. merge.h makes it of defaults, a TOML file and the command line; after that no
// function changes the Config that it is given, and a variation is a new one. Sections and keys are
// torchtitan's where it has them. An option is a member here and a line in options.cpp, which
// drives reading, help, printing and range checks; a list of them is one in tables.cpp.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/mesh.h"
#include "moesh/data/registry.h"
#include "moesh/formats/toml.h"
#include "moesh/kernels/float8.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/models/adapter.h"
#include "moesh/models/registry.h"
#include "moesh/nn/dispatch.h"
#include "moesh/optim/groups.h"
#include "moesh/optim/schedule.h"
#include "moesh/pipeline/stage_plan.h"

namespace moesh::config {

using Value = formats::TomlValue;

struct ModelSection {
  std::string name = "deepseek_v3";
  std::string size = "tiny";  // empty: of a folder, whose keys are all given
  /// The built-in configuration of that name and size, changed by the further keys of [model].
  models::AnyConfig architecture = models::built_in("deepseek_v3", "tiny");
  /// Where it comes from a config.json, which may say more than the keys do.
  std::string folder = {};
};

struct TrainingSection {
  std::int64_t steps = 100;
  std::int64_t seed = 0;
  std::string dtype = "float32";
  std::string device = "cpu";
  std::int64_t global_batch_size = 0;
  std::int64_t gradient_accumulation_steps = 1;
  double max_norm = 1;
  double mtp_loss_weight = 0.3;
  std::string freeze = "";
  std::string float8 = "off";
  std::string float8_dense = "off";
  std::string float8_rows = "off";
  std::int64_t float8_tile = 128;
  double max_minutes = 0;
  std::int64_t max_skipped_steps = 10;
};

struct DataSection {
  std::string path = "";
  std::string kind = "auto";
  std::int64_t batch_size = 2;
  std::int64_t sequence_length = 64;
  std::int64_t seed = 0;
  bool shuffle = true;
  std::int64_t synthetic_successors = 4;
  std::string document_mask = "auto";
  std::string packing = data::kCut;
  std::string tokenizer = "";
  std::string token_folder = "outputs/tokens";
  std::vector<data::SourceOptions> source = {};  // several files to train on
};

struct ValidationSection {
  std::int64_t interval = 500;
  std::int64_t steps = 10;
  std::vector<data::SourceOptions> source = {};  // which have no weight
};

struct ParallelismSection {
  std::int64_t data_parallel_replicate_degree = 1;
  std::int64_t data_parallel_shard_degree = 1;
  std::int64_t context_parallel_degree = 1;
  std::string context_parallel_cut = "auto";
  std::int64_t tensor_parallel_degree = 1;
  std::int64_t expert_parallel_degree = 1;
  std::int64_t expert_tensor_parallel_degree = 1;
  std::int64_t pipeline_parallel_degree = 1;
  std::string pipeline_parallel_schedule = "1f1b";
  std::string pipeline_parallel_layers_per_stage = "";
  bool sequence_parallel = true;
  bool fsdp_reshard_after_forward = true;
  bool overlap_reductions = true;
  bool overlap_experts = false;
  std::string moe_dispatcher = "auto";
  std::int64_t ranks_per_node = 0;
};

struct OptimizerSection {
  std::string name = "adamw";
  double lr = 8e-4;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.9;
  double muon_momentum = 0.95;
  bool nesterov = true, muon_float32 = false, muon_by_head = false;
  double qk_clip = 0;
  std::vector<optim::GroupOptions> group = {};
};

struct MoeSection {
  double load_balance_coeff = 1e-3;  // of the model above; each has its own
  std::string score_before_experts = "auto";
  double balance_loss_weight = 1e-4;  // likewise
  std::string balance_over = "sequence";
  double z_loss_weight = 0;
  bool force_load_balance = false;
  std::string record = "";
  std::string replay = "";
};

/// Train an addition of low rank to each of some weights, and freeze the model. Names are PEFT's.
struct LoraSection {
  std::int64_t rank = 0;
  double alpha = 8;
  std::string targets = models::kAllLinear;
  bool use_rslora = false;
  std::string rank_pattern = "";
  std::string alpha_pattern = "";
  bool init_lora_weights = true;
  double dropout = 0;
  std::string adapter = "";
  std::string base = "compute";
};

struct ActivationCheckpointSection {
  std::string mode = "none";
};

struct KernelsSection {
  std::string gpu = "auto";
  std::string graph = "auto";
  bool weight_copies = false;
};

struct CheckpointSection {
  bool enable = false;
  std::string folder = "outputs/checkpoints";
  std::int64_t interval = 500;
  bool async = false;
  std::int64_t keep_latest_k = 10;
  bool resume = true;
  bool accept_changes = false;
  std::string initial_load = "";
  std::string export_dtype = "auto";
  std::int64_t max_shard_size = 5'000'000'000;
};

struct MetricsSection {
  std::int64_t log_freq = 10;
  std::string folder = "outputs";
  bool enable_tensorboard = false;
  bool enable_csv = false;
  std::int64_t expert_counts_freq = 1;
  std::int64_t float8_freq = 100;
  double peak_tflops = 0;
  bool quiet = false;
};

struct ProfileSection {
  std::string steps = "";
};

struct DebugSection {
  bool checked = false;
  double timeout_seconds = 300;
  std::string links = "";
};

/// Where a value comes from.
struct Origin {
  std::string text;         // "run.toml:3", "command line", "verify's default"
  bool is_default = false;  // not set by the user
};

struct Config {
  ModelSection model;
  TrainingSection training;
  DataSection data;
  ValidationSection validation;
  ParallelismSection parallelism;
  OptimizerSection optimizer;
  optim::LrSchedule lr_scheduler;  // its num_steps are training.steps
  MoeSection moe;
  LoraSection lora;
  ActivationCheckpointSection activation_checkpoint;
  KernelsSection kernels;
  CheckpointSection checkpoint;
  MetricsSection metrics;
  ProfileSection profile;
  DebugSection debug;
  std::map<std::string, Origin> origins = {};  // by option or model key, where one was set

  /// Where an option was set, else "default" or "set by the program". For what the model
  /// decides, its keys, and options with its default that the user has not set: "deepseek_v3:tiny",
  /// or the config.json that says what the model is.
  Origin origin(const std::string& option) const;
};

/// Checks every rule; throws Error (config) which names the option, its value, where that came from
/// and what would work. world_size 0: the number of ranks of the mesh.
void validate(const Config& config, int world_size = 0);

/// "training.steps is 0 (run.toml:3)", the beginning of every message. Takes model keys too.
std::string describe_option(const Config& config, const std::string& option);

/// Every option with its effective value and where it came from, as TOML: --config reads it back.
/// `notes` are further comments, by the name of an option ("optimizer.group.0.match").
std::string print_config(const Config& config,
                         const std::map<std::string, std::string>& notes = {});
/// Every option with its default and what it takes, by section, and the keys of the model.
std::string help_text(const Config& config = {});

// The options in the terms of the folders which they configure.
MeshShape mesh_shape(const Config& config);
at::ScalarType scalar_type(const Config& config);
/// How cp ranks cut the sequences of training: as the key says, or by what the layers see, of the
/// model and on the mesh of the configuration, or of those that are given.
SequenceCut sequence_cut(const Config& config);
SequenceCut sequence_cut(const Config& config,
                         const std::vector<std::optional<nn::AttentionOptions>>& layers,
                         int num_cp);
/// The device of the ranks of this process: where a machine has several GPUs, each process takes
/// its own.
at::Device device(const Config& config);
comm::LaunchOptions launch_options(const Config& config);
/// Links by the file debug.links, on the nodes of the mesh; nothing: as fast as they are. Throws
/// Error (config) where the file is not one of links.
std::optional<comm::Links> links(const Config& config);
nn::Dispatcher dispatcher(const Config& config);
/// Nothing: as the model does it.
std::optional<bool> score_before_experts(const Config& config);
kernels::GpuKernels gpu_kernels(const Config& config);
kernels::Float8 float8(const Config& config);
/// Micro-batches of an optimizer step: what training.global_batch_size takes on this mesh, where it
/// is set.
std::int64_t num_micro_batches(const Config& config);
/// With another number of data-parallel ranks.
std::int64_t num_micro_batches(const Config& config, std::int64_t num_dp);
/// Steps that are traced, counted from 1; nothing: none is. Throws Error (config) where the text of
/// profile.steps is not such a range of steps of the run.
struct StepRange {
  std::int64_t first = 1, last = 1;
};
std::optional<StepRange> profile_steps(const Config& config);
data::SampleOrder sample_order(const Config& config);
/// The layers of each stage, as the user wants them or balanced by FLOPs. Without pp: one stage.
pipeline::StagePlan stage_plan(const Config& config);
/// With another pp and schedule; `flops` where the caller knows them.
pipeline::StagePlan stage_plan(const Config& config, int num_ranks_of_pp,
                               const std::string& schedule, models::FlopsOfParts flops = {});
optim::Groups param_groups(const Config& config);
bool has_lora(const Config& config);
/// Which weights LoRA adapts, and how: as [lora] says, or the adapter which it names. Nothing: all
/// of the model is trained.
models::Lora lora(const Config& config);
/// Whether attention stays within documents.
bool document_mask(const Config& config);
data::DatasetOptions dataset_options(const Config& config);
/// The options of one of the files to validate on: read from its beginning, in its order.
/// Depths of multi-token prediction.
std::int64_t num_mtp_layers(const Config& config);
data::DatasetOptions validation_options(const Config& config, const data::SourceOptions& source);

}  // namespace moesh::config
