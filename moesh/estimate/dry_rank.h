#pragma once
// One rank of a mesh by itself on the device meta, with the model and the optimizer of the run.

#include <memory>
#include <optional>

#include "moesh/estimate/estimate.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/kernels/meta/work.h"

namespace moesh::estimate {

class DryRank {
 public:
  /// The first rank with these places on pp and cp. `config` must outlive it.
  DryRank(const Config& config, int rank_of_pp, int rank_of_cp = 0);

  StateMemory state() const;
  /// As if a micro-batch had left them.
  void make_gradients();
  /// The step notes LibTorch's kernels as well, for its `work`; that takes time.
  void note_operations() { operations_.emplace(); }
  /// An optimizer step of so many micro-batches, whatever the configuration says. Once.
  Estimate step(std::int64_t num_micro_batches);

 private:
  std::int64_t gradient_bytes(const Stored& w) const;
  StateMemory expert_state() const;
  std::int64_t tp_gradients() const;
  std::int64_t num_stage_parameters() const;
  std::vector<models::MicroBatch> batches(std::int64_t num) const;

  const Config& config_;
  int rank_of_pp_;
  kernels::meta::DryRun memory_;
  std::optional<kernels::meta::OperationWatch> operations_;
  comm::SentBytes sent_;
  Mesh mesh_;
  MeshScope scope_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

}  // namespace moesh::estimate
