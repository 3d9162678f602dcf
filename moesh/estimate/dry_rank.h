#pragma once
// One rank of a mesh by itself on the device meta, with the model and the optimizer of the run.

#include <memory>

#include "moesh/estimate/estimate.h"
#include "moesh/kernels/meta/dry_run.h"

namespace moesh::estimate {

class DryRank {
 public:
  /// The first rank with this place on pp. `config` must outlive it.
  DryRank(const Config& config, int rank_of_pp);

  StateMemory state() const;
  /// As if a micro-batch had left them.
  void make_gradients();
  /// An optimizer step of so many micro-batches, whatever the configuration says. Once.
  Estimate step(std::int64_t num_micro_batches);

 private:
  StateMemory expert_state() const;
  std::int64_t tp_gradients() const;
  std::int64_t num_stage_parameters() const;
  std::vector<models::MicroBatch> batches(std::int64_t num) const;

  const Config& config_;
  int rank_of_pp_;
  kernels::meta::DryRun memory_;
  comm::SentBytes sent_;
  Mesh mesh_;
  MeshScope scope_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

}  // namespace moesh::estimate
