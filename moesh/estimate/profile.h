#pragma once
// What the layers of a model take on a mesh, one by one: dry runs of its first few layers differ by
// a layer each. What follows from the sizes of dp and pp alone is computed from that, so that a
// search over thousands of meshes runs the model on a few hundred.

#include <map>
#include <tuple>
#include <vector>

#include "moesh/estimate/estimate.h"

namespace moesh::estimate {

/// Of a layer, or of what is around the layers, in one micro-batch on one rank.
struct PartProfile {
  StateMemory dense, experts;
  double activations = 0;  // bytes held from forward to backward
  /// Without what depends on the size of a shard: the sums of these gradients over tp.
  comm::Ledger traffic;
  double tp_gradients = 0;  // bytes of shards that tp ranks sum
};

struct Profile {
  std::map<bool, PartProfile> layers;  // by whether the layer is a mixture of experts
  PartProfile ends;  // embedding and head; activations: all that is not held for a layer
};

/// The layers of the model of a configuration, whatever the mesh.
struct ModelShape {
  std::vector<bool> is_moe;         // of each layer
  std::vector<double> layer_flops;  // for each token, forward and backward
  double head_flops = 0;
  std::int64_t dim = 0;
  bool tied = false;  // the head is the embedding
};
ModelShape model_shape(const Config& config);

class Profiler {
 public:
  explicit Profiler(const Config& config) : config_(config), shape_(model_shape(config)) {}

  /// On this mesh, pp aside. Throws Error (config) where the model does not divide by it.
  Profile on(const MeshShape& mesh);
  const Config& config() const { return config_; }
  const ModelShape& model() const { return shape_; }
  int num_runs() const { return num_runs_; }  // dry runs so far

 private:
  const Profile& measured(const MeshShape& mesh);

  Config config_;
  ModelShape shape_;
  std::map<std::tuple<int, int, int, int>, Profile> known_;  // by cp, tp, ep, etp
  int num_runs_ = 0;
};

/// "dp_shard|tp" as axes.
Axes axes_of(const std::string& group);

}  // namespace moesh::estimate
