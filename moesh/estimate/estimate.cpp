#include "moesh/estimate/estimate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/config/merge.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/train/step.h"

namespace moesh::estimate {

using namespace train;
namespace {

// One rank of the mesh on the device meta, with the run's model and optimizer.
class DryRank {
 public:
  explicit DryRank(const Config& config)
      : config_(config),
        memory_(at::Device(config.training.device).type()),
        mesh_(mesh_shape(config), /*rank=*/0,
              [this](const std::string& name, int rank, const std::vector<int>& members) {
                return comm::fake_group(name, rank, members, traffic_);
              }),
        scope_(mesh_),
        model_(make_model(config, at::kMeta)),  // the real device may not be on this machine
        optimizer_(make_optimizer(*model_, config)) {}

  StateMemory state() const {
    StateMemory s;
    model_->each_param([&](const Stored& w, bool) { s.weights += bytes(w.value); });
    s.gradients = s.weights;  // of the shapes and the dtype of the master weights
    for (const auto& entry : optimizer_->state()) s.optimizer += bytes(entry.value);
    return s;
  }

  // Moments are spread over the parameters by their sizes.
  StateMemory expert_state() const {
    StateMemory s;
    model_->each_param([&](const Stored& w, bool) {
      if (w.storage == efsdp) s.weights += bytes(w.value);
    });
    s.gradients = s.weights;
    const StateMemory all = state();
    s.optimizer = all.weights == 0 ? 0
                                   : static_cast<std::int64_t>(static_cast<double>(all.optimizer) *
                                                               static_cast<double>(s.weights) /
                                                               static_cast<double>(all.weights));
    return s;
  }

  std::int64_t tp_gradients() const {
    std::int64_t sum = 0;
    model_->each_param([&](const Stored& w, bool) {
      if (contains(w.replicas, tp)) sum += bytes(w.value);
    });
    return sum;
  }

  void make_gradients() {
    model_->each_param(
        [](Stored& w, bool) { w.value.mutable_grad() = at::zeros_like(w.value.detach()); });
  }

  Estimate step() {
    const auto batch = config_.data.batch_size, sequence = config_.data.sequence_length;
    const auto num_micro = num_micro_batches(config_);
    Estimate e{.mesh = mesh_.shape(),
               .num_parameters = model_->num_parameters(),
               .num_active_parameters = model_->num_active_parameters(),
               .num_tokens = mesh_.size(dp) * batch * sequence * num_micro,
               .state = state(),
               .expert_state = expert_state(),
               .tp_gradients = tp_gradients()};
    {
      std::vector<models::MicroBatch> batches;
      const auto ids = [&] {
        return at::empty({batch, sequence}, at::TensorOptions(at::kMeta).dtype(at::kLong));
      };
      for (std::int64_t i = 0; i < num_micro; ++i) {
        batches.push_back({.input_ids_BL = ids(), .labels_BL = ids()});
        if (document_mask(config_))
          batches.back().documents = {ids(), most_documents(batch, sequence, 0)};
      }
      const StepOptions options = step_options(config_);
      take_step(*model_, *optimizer_, std::move(batches), learning_rate(config_, 0), options);
    }
    e.peak = memory_.peak();
    e.num_reads = memory_.num_reads();
    e.traffic = traffic_;
    return e;
  }

 private:
  static std::int64_t bytes(const at::Tensor& t) { return static_cast<std::int64_t>(t.nbytes()); }

  const Config& config_;
  kernels::meta::DryRun memory_;
  comm::Ledger traffic_;
  Mesh mesh_;
  MeshScope scope_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

// Whether every degree that the configuration asks for is that of the mesh; 1 asks for nothing.
bool keeps_degrees(const Config& config, const MeshShape& shape) {
  const MeshShape asked = mesh_shape(config);
  const auto keeps = [](int wanted, int size) { return wanted == 1 || wanted == size; };
  return keeps(asked.dp_replicate, shape.dp_replicate) && keeps(asked.dp_shard, shape.dp_shard) &&
         keeps(asked.cp, shape.cp) && keeps(asked.tp, shape.tp) && keeps(asked.ep, shape.ep) &&
         keeps(asked.etp, shape.etp);
}

// Nothing where heads or experts do not divide by the mesh, or its state is over the limit.
std::optional<Estimate> try_mesh(const Config& config, const MeshShape& shape,
                                 std::optional<std::int64_t> limit) {
  try {
    return estimate(changed(config, config::mesh_settings(shape, "--search")), limit);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    return std::nullopt;
  }
}

// The meshes with the same dense axes.
struct Family {
  std::vector<MeshShape> shapes;
  double bound = 0;  // bytes a token that each of them sends at least
};

bool same_dense_axes(const MeshShape& a, const MeshShape& b) {
  return a.dp_replicate == b.dp_replicate && a.dp_shard == b.dp_shard && a.cp == b.cp &&
         a.tp == b.tp;
}

// What is sent over dense axes, by attention, norms, shared experts and their parameters, is sent
// however the experts are cut. (Less a per cent: gradients of expert biases are summed over other
// axes where etp cuts the experts.)
double dense_bound(const Estimate& e) {
  double sum = 0;
  for (const auto& [key, entry] : e.traffic) {
    const std::string axes = "|" + key.first + "|";
    const auto has = [&](const char* axis) { return axes.find(axis) != std::string::npos; };
    if (!has("|efsdp|") && !has("|ep|") && !has("|etp|"))
      sum += static_cast<double>(entry.num_bytes);
  }
  return 0.99 * sum * e.mesh.num_ranks() / static_cast<double>(e.num_tokens);
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

std::optional<Estimate> estimate(const Config& config, std::optional<std::int64_t> limit) {
  DryRank rank(config);
  if (limit && rank.state().total() > *limit) return std::nullopt;
  return rank.step();
}

Estimate estimate_later_micro_batch(const Config& config) {
  DryRank rank(config);
  rank.make_gradients();
  return rank.step();
}

StateMemory state_memory(const Config& config) { return DryRank(config).state(); }

Estimate estimate(const Config& config) { return *estimate(config, std::nullopt); }

SearchResult search(const Config& config, int num_ranks, std::int64_t limit, size_t most) {
  SearchResult result;
  std::vector<Family> families;
  for (const auto& shape : all_mesh_shapes(num_ranks)) {
    ++result.num_meshes;
    if (!keeps_degrees(config, shape)) continue;
    if (families.empty() || !same_dense_axes(families.back().shapes[0], shape))
      families.emplace_back();
    families.back().shapes.push_back(shape);
  }
  std::erase_if(families, [&](Family& f) {
    MeshShape whole_experts = f.shapes[0];
    whole_experts.ep = whole_experts.etp = 1, whole_experts.efsdp = 0;
    const auto e = try_mesh(config, whole_experts, std::nullopt);
    if (e) f.bound = dense_bound(*e);
    return !e;  // heads do not divide by tp, whatever the experts do
  });
  std::stable_sort(families.begin(), families.end(),
                   [](const Family& a, const Family& b) { return a.bound < b.bound; });

  auto& best = result.best;
  for (const Family& f : families) {
    if (best.size() == most && f.bound > best.back().moved_per_token()) break;
    for (const auto& shape : f.shapes) {
      ++result.num_tried;
      auto e = try_mesh(config, shape, limit);
      if (!e || e->peak > limit) continue;
      const auto place =
          std::upper_bound(best.begin(), best.end(), *e, [](const Estimate& a, const Estimate& b) {
            return a.moved_per_token() < b.moved_per_token();
          });
      best.insert(place, std::move(*e));
      if (best.size() > most) best.pop_back();
    }
  }
  return result;
}

formats::JsonValue to_json(const Estimate& e) {
  using formats::JsonObject;
  formats::JsonList traffic;
  for (const auto& [key, entry] : e.traffic)
    traffic.push_back({JsonObject{{"group", {key.first}},
                                  {"collective", {std::string(comm::to_string(key.second))}},
                                  {"calls", {std::int64_t{entry.num_calls}}},
                                  {"bytes", {std::int64_t{entry.num_bytes}}}}});
  return {JsonObject{{"mesh", {e.mesh.describe()}},
                     {"ranks", {std::int64_t{e.mesh.num_ranks()}}},
                     {"parameters", {e.num_parameters}},
                     {"active_parameters", {e.num_active_parameters}},
                     {"tokens", {e.num_tokens}},
                     {"weights", {e.state.weights}},
                     {"gradients", {e.state.gradients}},
                     {"optimizer", {e.state.optimizer}},
                     {"activations", {e.activations()}},
                     {"peak", {e.peak}},
                     {"sent", {e.moved()}},
                     {"traffic", {std::move(traffic)}}}};
}

}  // namespace moesh::estimate
