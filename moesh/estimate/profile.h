#pragma once
// What the layers of a model take on a mesh, one by one: dry runs of its first few layers differ by
// a layer each. What follows only from the sizes of dp and pp is computed from that, so that a
// search over thousands of meshes runs the model on a few hundred.

#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "moesh/estimate/estimate.h"

namespace moesh::estimate {

/// What a layer, or the part around the layers, takes in one micro-batch on one rank.
struct PartProfile {
  StateMemory dense, experts;
  double activations = 0;  // bytes held from forward to backward
  double kept = 0;         // from the half of backward for the inputs to that for the weights
  double gathered = 0;     // parameters that the micro-batches of a pipeline share for the step
  /// Without what depends on the size of a shard: the sums of these gradients over tp.
  comm::Ledger traffic;
  double tp_gradients = 0;  // bytes of shards that tp ranks sum
  PassWork work;
};

struct Profile {
  std::map<bool, PartProfile> layers;  // by whether the layer is a mixture of experts
  PartProfile ends;                    // embedding and head; activations: what the head holds
  /// Bytes that come and go: gathered parameters, sums that travel, logits. On the last stage, on
  /// the first, and on those between, which have neither head nor embedding.
  double always = 0, always_on_first = 0, always_between = 0;
};

/// How a pipeline goes through backward, if there is one: as soon as it can, after all forwards, or
/// in two halves.
enum class BackwardOrder { one, soon, after_all, in_halves };

/// The layers of the model of a configuration, whatever the mesh.
struct ModelShape {
  std::vector<bool> is_moe;    // of each layer
  models::FlopsOfParts flops;  // for each token, forward and backward
  std::int64_t dim = 0;
  // Shares of what is around the layers (embedding, head, layers of multi-token prediction) that
  // the first and the last stage have, by parameters that are not those of experts.
  double of_first = 0.5, of_last = 0.5;
  // What Muon moves, and the FLOPs of a step that makes it nearly orthogonal; 0 with other rules.
  double muon_numbers = 0, muon_flops = 0;
};
ModelShape model_shape(const Config& config);

class Profiler {
 public:
  /// Whatever the device of the configuration, on an accelerator.
  explicit Profiler(const Config& config);

  /// On this mesh, pp aside. Throws Error (config) where the model does not divide by it. What
  /// only stages have is measured if it is asked for.
  Profile on(const MeshShape& mesh, BackwardOrder stages = BackwardOrder::one);
  const Config& config() const { return config_; }
  const ModelShape& model() const { return shape_; }
  /// Dry runs so far.
  int num_runs() const { return num_runs_ + (resharding_ ? resharding_->num_runs_ : 0); }

 private:
  using Way = std::tuple<int, int, int, int, bool>;  // cp, tp, ep, etp, whether there is dp_shard
  struct OfStages {
    std::map<bool, double> kept;  // by each kind of layer
    double always_on_first = 0, always_between = 0;
  };
  const Profile& measured(const MeshShape& mesh);
  Profile with_shared_gathers(const MeshShape& mesh, BackwardOrder stages);
  const OfStages& measured_stages(const MeshShape& mesh, BackwardOrder stages);

  Config config_;
  ModelShape shape_;
  std::unique_ptr<Profiler> resharding_;  // the same with fsdp_reshard_after_forward, if needed
  std::map<Way, Profile> known_;
  std::map<std::pair<Way, BackwardOrder>, OfStages> known_stages_;
  int num_runs_ = 0;
};

/// "dp_shard|tp" as axes.
Axes axes_of(const std::string& group);

}  // namespace moesh::estimate
