#include "moesh/train/build.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "moesh/config/options.h"
#include "moesh/models/disk.h"
#include "moesh/optim/registry.h"
#include "moesh/optim/schedule.h"
#include "moesh/spmd/one_rank.h"

namespace moesh::train {
namespace {

models::Recompute recompute(const Config& config) {
  const std::string& mode = config.activation_checkpoint.mode;
  return mode == "full"        ? models::Recompute::full
         : mode == "selective" ? models::Recompute::selective
                               : models::Recompute::none;
}

optim::Schedule schedule(const Config& config) {
  using Kind = optim::ScheduleConfig::Kind;
  const auto& s = config.lr_scheduler;
  const Kind kind = s.kind == "cosine"   ? Kind::cosine
                    : s.kind == "linear" ? Kind::linear
                    : s.kind == "wsd"    ? Kind::wsd
                                         : Kind::constant;
  return optim::Schedule({.kind = kind,
                          .num_steps = config.training.steps,
                          .warmup_steps = s.warmup_steps,
                          .decay_ratio = s.decay_ratio,
                          .min_lr_factor = s.min_lr_factor});
}

// Where the layers of each stage begin and end, of those that a rank of pp has.
std::vector<models::LayerRange> stages_of(const Config& config, int rank) {
  if (config.parallelism.pipeline_parallel_degree == 1) return {};
  const auto schedule = schedule_of(pipeline_options(config), 1);
  std::vector<models::LayerRange> mine;
  std::int64_t begin = 0;
  int stage = 0;
  for (const int num_layers : stage_plan(config)) {
    if (schedule.rank_with(stage++) == rank) mine.push_back({begin, begin + num_layers});
    begin += num_layers;
  }
  return mine;
}

}  // namespace

std::int64_t top_k(const Config& config) {
  return std::visit([](const auto& m) { return m.top_k; }, config.model.architecture);
}

std::unique_ptr<models::Model> make_model(const Config& config, at::Device device) {
  // By the device of the run, which an estimate counts for on another.
  const at::Device of_run(config.training.device);
  const nn::Dispatcher way =
      nn::resolve(dispatcher(config), mesh_shape(config), top_k(config),
                  device.is_meta() ? nn::planned_exchange(of_run) : nn::exchange_of(of_run));
  auto model = models::make_model(config.model.architecture,
                                  {.dtype = scalar_type(config),
                                   .device = device,
                                   .seed = static_cast<std::uint64_t>(config.training.seed),
                                   .dispatcher = way,
                                   .forced_balance = config.moe.force_load_balance,
                                   .score_before_experts = score_before_experts(config),
                                   .gpu_kernels = gpu_kernels(config),
                                   .weight_copies = config.kernels.weight_copies,
                                   .stages = stages_of(config, current_mesh().coordinate(pp))});
  open_channels(*model, pipeline_options(config));
  return model;
}

std::unique_ptr<models::Model> make_model(const Config& config) {
  return make_model(config, device(config));
}

namespace {

// What [[optimizer.group]] says of each parameter, by its own name or by those that its values have
// in a checkpoint: layers.0.mlp.experts.w1 is ..experts.0.gate_proj.weight and so on there.
class GroupOfParam {
 public:
  explicit GroupOfParam(const Config& config) : groups_(param_groups(config)) {
    if (groups_.size() == 0) return;
    for (const auto& t : on_disk(config).table(formats::ExpertLayout::per_expert).tensors)
      for (const auto& source : t.sources)
        if (t.name != source.param) in_files_[source.param].push_back(t.name);
  }

  const optim::Groups& groups() const { return groups_; }
  const std::vector<std::string>& in_files(const std::string& param) const {
    static const std::vector<std::string> none;
    const auto found = in_files_.find(param);
    return found == in_files_.end() ? none : found->second;
  }
  std::optional<std::size_t> find(const std::string& param) const {
    return groups_.find(param, in_files(param));
  }

 private:
  optim::Groups groups_;
  std::map<std::string, std::vector<std::string>> in_files_;  // by parameter
};

// Of the whole model: what a group matches may be on another stage.
std::vector<optim::GroupMatch> group_matches(const Config& config, const GroupOfParam& groups) {
  if (groups.groups().size() == 0) return {};
  const OneRankScope scope;
  const auto model = models::make_model(config.model.architecture, {.device = at::kMeta});
  std::vector<optim::GroupMatch> matches(groups.groups().size());
  std::vector<std::string> names;
  model->each_param([&](Stored& w, bool) {
    names.push_back(w.spec.name);
    const auto& in_files = groups.in_files(w.spec.name);
    names.insert(names.end(), in_files.begin(), in_files.end());
    const auto found = groups.find(w.spec.name);
    if (!found) return;
    ++matches[*found].num_tensors;
    matches[*found].num_parameters += std::accumulate(
        w.spec.shape.begin(), w.spec.shape.end(), std::int64_t{1}, std::multiplies<std::int64_t>());
  });
  optim::check_matches(groups.groups(), matches, names);
  return matches;
}

}  // namespace

std::vector<optim::GroupMatch> group_matches(const Config& config) {
  return group_matches(config, GroupOfParam(config));
}

std::unique_ptr<optim::Optimizer> make_optimizer(models::Model& model, const Config& config) {
  const GroupOfParam group_of(config);
  group_matches(config, group_of);  // one that matches nothing throws
  const optim::Groups& groups = group_of.groups();
  optim::ParamList params;
  model.each_param([&](Stored& w, bool decays) {
    const auto found = group_of.find(w.spec.name);
    const bool is_asked = found && groups[*found].weight_decay;
    params.add(w, decays || is_asked ? optim::Decay::on : optim::Decay::off);
  });
  const optim::RuleKind& kind = optim::find_rule(config.optimizer.name);
  optim::RuleValues values;
  for (const auto& key : kind.keys)
    values[key] = std::get<double>(config::find_option("optimizer." + key)->get(config));
  const optim::Optimizer::Way of_others{kind.make(values)};
  std::vector<optim::Optimizer::Way> ways;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    optim::RuleValues own = values;
    if (groups[i].weight_decay) own["weight_decay"] = *groups[i].weight_decay;
    ways.push_back({groups[i].weight_decay ? kind.make(own) : of_others.rule, groups[i].lr_scale});
  }
  return std::make_unique<optim::Optimizer>(
      params, [group_of, ways, of_others](const optim::ParamList::Entry& entry) {
        const auto found = group_of.find(entry.stored->spec.name);
        return found ? ways[*found] : of_others;
      });
}

PipelineOptions pipeline_options(const Config& config) {
  const auto degree = static_cast<int>(config.parallelism.pipeline_parallel_degree);
  return {.schedule = config.parallelism.pipeline_parallel_schedule,
          .stages_of_a_rank = static_cast<int>(stage_plan(config).size()) / degree};
}

StepOptions step_options(const Config& config) {
  StepOptions options{.max_norm = config.training.max_norm,
                      .bias_coeff = config.moe.load_balance_coeff,
                      .overlap = config.parallelism.overlap_reductions,
                      .pipeline = pipeline_options(config)};
  options.forward = {.sequence_parallel = config.parallelism.sequence_parallel,
                     .recompute = recompute(config),
                     .auxiliary = {.balance_weight = config.moe.balance_loss_weight,
                                   .z_weight = config.moe.z_loss_weight,
                                   .balance_over = config.moe.balance_over == "sequence"
                                                       ? nn::BalanceOver::sequence
                                                       : nn::BalanceOver::micro_batch},
                     .reshard = config.parallelism.fsdp_reshard_after_forward};
  return options;
}

UseGraph use_graph(const Config& config) {
  return config.kernels.graph == "on"    ? UseGraph::on
         : config.kernels.graph == "off" ? UseGraph::off
                                         : UseGraph::automatic;
}

double learning_rate(const Config& config, std::int64_t step) {
  return config.optimizer.lr * schedule(config).factor(step);
}

std::unique_ptr<data::Dataset> open_dataset(const Config& config) {
  return data::open_dataset(dataset_options(config));
}

std::int64_t most_documents(std::int64_t batch, std::int64_t sequence, std::int64_t num) {
  constexpr std::int64_t kTypical = 256;  // tokens of a document, or more
  std::int64_t most = batch * std::max<std::int64_t>(1, sequence / kTypical);
  while (most < num) most *= 2;
  return most;
}

std::vector<models::MicroBatch> host_batches(const Config& config, const data::Dataset& dataset,
                                             const Mesh& mesh, std::int64_t data_position) {
  const auto order = sample_order(config);
  std::vector<models::MicroBatch> batches;
  std::int64_t num_documents = 0;
  for (std::int64_t micro = 0; micro < order.num_micro; ++micro) {
    const auto b = data::make_batch(
        dataset, data_position + order.first(0, micro, mesh.coordinate(dp)), order.batch);
    models::MicroBatch batch{.input_ids_BL = b.input_ids_BL, .labels_BL = b.labels_BL};
    if (document_mask(config)) batch.documents.starts_BL = b.document_starts_BL;
    num_documents = std::max(num_documents, b.num_documents);
    // From pinned memory the copy to a GPU is not waited for.
    if (config.training.device != "cpu")
      for (at::Tensor* t : batch.from_data()) *t = t->pin_memory();
    batches.push_back(std::move(batch));
  }
  // One bound for all of a step, or each pattern of bounds would be a graph.
  for (auto& b : batches)
    if (b.documents.any())
      b.documents.most = most_documents(order.batch, dataset.sequence_length(), num_documents);
  return batches;
}

std::vector<models::MicroBatch> on_device(const Config& config,
                                          std::vector<models::MicroBatch> batches) {
  for (auto& b : batches)
    for (at::Tensor* t : b.from_data()) *t = t->to(device(config), /*non_blocking=*/true);
  return batches;
}

formats::ModelOnDisk on_disk(const Config& config) {
  return models::on_disk(config.model.architecture);
}

}  // namespace moesh::train
