#pragma once
// The tokens of one micro-batch: which of them each rank holds, and their places in the whole.

#include <ATen/core/Tensor.h>

#include <vector>

#include "moesh/comm/mesh.h"
#include "moesh/types/token.h"

namespace moesh::nn {

/// Every dp rank has `batch` sequences of `sequence` tokens, numbered through over dp. The sequence is cut over cp x tp. With
/// sequence parallelism a rank holds its own piece [batch, len]; without it the tp ranks hold the same block of cp [batch,
/// block], and inside the layer each takes a flat part of it.
class Tokens {
 public:
  Tokens(const Mesh& mesh, std::int64_t batch, std::int64_t sequence, bool sequence_parallel);

  std::int64_t batch() const { return batch_; }
  std::int64_t sequence() const { return sequence_; }
  bool sequence_parallel() const { return sequence_parallel_; }
  /// Tokens of the residual stream [batch, length()] as this rank has it.
  std::int64_t length() const;
  /// Tokens which this rank works on inside the layer: T on every axis.
  std::int64_t num_local() const { return num_local(rank_); }
  std::int64_t num_local(int rank) const;
  /// How many fewer than the longest piece: rows that a padded layout would add here. None of them exists.
  std::int64_t num_padding() const { return batch_ * shard(rank_).pieces().stride() - num_local(); }
  /// All tokens of the micro-batch, over dp, cp and tp.
  std::int64_t num_global() const { return num_dp_ * batch_ * sequence_; }
  /// num_local of each rank of a group.
  std::vector<std::int64_t> rows(const comm::Group& group) const;

  GlobalToken global(LocalToken t) const;
  /// global() of every local token, int64 [num_local].
  at::Tensor global_ids(at::Device device = at::kCPU) const;
  /// The sequence of every local token among this dp rank's, int64 [num_local].
  at::Tensor sequence_ids(at::Device device = at::kCPU) const;

 private:
  SequenceShard shard(int rank) const;
  std::int64_t flat_start(int rank) const;

  const Mesh& mesh_;
  std::int64_t batch_, sequence_;
  bool sequence_parallel_;
  int rank_;
  std::int64_t num_dp_;
};

}  // namespace moesh::nn
