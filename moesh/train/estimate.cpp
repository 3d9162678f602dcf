#include "moesh/train/estimate.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/train/step.h"

namespace moesh::train {
namespace {

// One rank of the mesh on the device meta, with the run's model and optimizer.
class DryRank {
 public:
  DryRank(const Config& config, const ModelSetup& setup)
      : config_(config),
        memory_(at::Device(config.training.device).type()),
        mesh_(mesh_shape(config), /*rank=*/0,
              [this](const std::string& name, int rank, const std::vector<int>& members) {
                return comm::fake_group(name, rank, members, traffic_);
              }),
        scope_(mesh_),
        model_(models::make_model(setup.config, options(config))),
        optimizer_(make_optimizer(*model_, config)) {}

  StateMemory state() const {
    StateMemory s;
    model_->each_param([&](const Stored& w, bool) { s.weights += bytes(w.value); });
    s.gradients = s.weights;  // of the shapes and the dtype of the master weights
    for (const auto& entry : optimizer_->state()) s.optimizer += bytes(entry.value);
    return s;
  }

  Estimate step() {
    const auto batch = config_.data.batch_size, sequence = config_.data.sequence_length;
    const auto num_micro = config_.training.gradient_accumulation_steps;
    Estimate e{.mesh = mesh_.shape(),
               .num_parameters = model_->num_parameters(),
               .num_active_parameters = model_->num_active_parameters(),
               .num_tokens = mesh_.size(dp) * batch * sequence * num_micro,
               .state = state()};
    {
      std::vector<models::MicroBatch> batches;
      const auto ids = [&] { return at::empty({batch, sequence}, at::TensorOptions(at::kMeta).dtype(at::kLong)); };
      for (std::int64_t i = 0; i < num_micro; ++i) batches.push_back({.input_ids_BL = ids(), .labels_BL = ids()});
      const StepOptions options = step_options(config_);
      Gradients gradients = accumulate_gradients(*model_, std::move(batches), options);
      gradients.num_tokens = e.num_tokens;  // meta counted none, and a step without tokens is skipped
      apply_gradients(*model_, *optimizer_, gradients, /*lr=*/0, options);
    }
    e.peak = memory_.peak();
    e.traffic = traffic_;
    return e;
  }

 private:
  static models::ModelOptions options(Config config) {
    config.training.device = "cpu";  // the real one may not be on this machine
    models::ModelOptions o = model_options(config);
    o.device = at::kMeta;
    return o;
  }
  static std::int64_t bytes(const at::Tensor& t) { return static_cast<std::int64_t>(t.nbytes()); }

  const Config& config_;
  kernels::meta::DryRun memory_;
  comm::Ledger traffic_;
  Mesh mesh_;
  MeshScope scope_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

Config on_mesh(Config config, const MeshShape& shape) {
  auto& p = config.parallelism;
  p.data_parallel_replicate_degree = shape.dp_replicate, p.data_parallel_shard_degree = shape.dp_shard;
  p.context_parallel_degree = shape.cp, p.tensor_parallel_degree = shape.tp;
  p.expert_parallel_degree = shape.ep, p.expert_tensor_parallel_degree = shape.etp;
  return config;
}

}  // namespace

std::int64_t Estimate::moved() const {
  std::int64_t sum = 0;
  for (const auto& [key, entry] : traffic) sum += entry.num_bytes;
  return sum;
}

double Estimate::moved_per_token() const {
  return static_cast<double>(moved()) * mesh.num_ranks() / static_cast<double>(num_tokens);
}

std::optional<Estimate> estimate(const Config& config, const ModelSetup& setup, std::optional<std::int64_t> limit) {
  DryRank rank(config, setup);
  if (limit && rank.state().total() > *limit) return std::nullopt;
  return rank.step();
}

Estimate estimate(const Config& config, const ModelSetup& setup) { return *estimate(config, setup, std::nullopt); }

SearchResult search(const Config& config, const ModelSetup& setup, int num_ranks, std::int64_t limit) {
  SearchResult result;
  for (const auto& shape : all_mesh_shapes(num_ranks)) {
    ++result.num_meshes;
    const Config c = on_mesh(config, shape);
    std::optional<Estimate> e;
    try {
      validate(c, num_ranks, setup.facts());
      e = estimate(c, setup, limit);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::config) throw;
      continue;  // heads or experts do not divide by this mesh
    }
    ++result.num_valid;
    if (e && e->peak <= limit) result.fitting.push_back(std::move(*e));
  }
  std::stable_sort(result.fitting.begin(), result.fitting.end(),
                   [](const Estimate& a, const Estimate& b) { return a.moved_per_token() < b.moved_per_token(); });
  return result;
}

}  // namespace moesh::train
