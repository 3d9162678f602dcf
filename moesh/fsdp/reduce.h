#pragma once
// The sums of gradients over ranks, and messages of several tensors, such as the sums and the
// gathers of a block send.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/spmd/tensor.h"

namespace moesh::raw {

// Several tensors, each divided among ranks along a dimension of its own, as one message: first all
// that belongs to rank 0, tensor after tensor, then all of rank 1, and so on.

/// A tensor of a message: its whole shape, the dimension along which ranks divide it, and how much
/// each of them has. One rank that has all of it: no sizes.
struct FlatPart {
  std::vector<std::int64_t> shape;
  std::int64_t dim;
  std::vector<std::int64_t> sizes;
};

class Flat {
 public:
  Flat(std::vector<FlatPart> parts, int num_ranks);

  std::int64_t numel() const;
  /// Elements of each rank: a message of which rank r has rows [.., + rank_sizes[r]).
  const std::vector<std::int64_t>& rank_sizes() const { return rank_sizes_; }

  /// Writes the whole of tensor i into the message of all ranks, and its elements of one rank into
  /// a message of only that rank; cast as they are written.
  void put_whole(const at::Tensor& message, std::size_t i, const at::Tensor& whole) const;
  void put_part(const at::Tensor& message_of_rank, std::size_t i, const at::Tensor& part,
                int rank) const;
  /// The other way: copies all of tensor i out of the message of all ranks, its `dim` first; and a
  /// view of it in a message of only one rank.
  void take_whole(const at::Tensor& message, std::size_t i, const at::Tensor& rows) const;
  at::Tensor part_of_rank(const at::Tensor& message_of_rank, std::size_t i, int rank) const;

 private:
  std::int64_t length(std::size_t i, int rank) const;
  // Elements of tensor i for each step along its dim.
  std::int64_t inner(std::size_t i) const;
  std::int64_t offset(std::size_t i, int rank) const;  // in a message of this rank
  // [length, other dimensions], a view.
  at::Tensor rows_of(const at::Tensor& message_of_rank, std::size_t i, int rank) const;
  // f(rows of the rank in the message, first row of the rank in the whole), for each rank.
  template <class F>
  void each_rank(const at::Tensor& message, std::size_t i, const F& f) const;

  std::vector<FlatPart> parts_;
  int num_ranks_;
  std::vector<std::int64_t> rank_sizes_;
};

}  // namespace moesh::raw

namespace moesh {

// The gradients of parameters, summed over the ranks while backward goes on: those of a block
// travel together, in one flat buffer, and are awaited two blocks later, the last ones before the
// optimizer reads them.

namespace raw {

struct Reductions;

/// A term of a parameter's gradient, that of this rank's work: [compute region].
struct GradientTerm {
  at::Tensor leaf;  // what gets the gradient: this rank's shard
  at::Tensor grad;
  at::ScalarType dtype;  // of the sum
  std::shared_ptr<comm::Group> storage, replicas;
  std::shared_ptr<comm::Group> same_work;  // ranks that find the same sum
  std::int64_t dim;                        // along which the storage ranks divide it
  std::vector<std::int64_t> sizes;         // of each of them
  std::string name;
};

/// The sum, as a gradient of the leaf: reduce_scatter over the storage ranks, all_reduce over the
/// replicas. It is undefined if the step has `reductions`, which bring it to the leaf, or if there
/// is only one rank: then the leaf keeps it in the type of the work until more is added.
at::Tensor reduce(const GradientTerm& term, const std::shared_ptr<Reductions>& reductions);
/// The same, when no backward waits for it: the sum is added to the leaf.
void reduce_to_leaf(const GradientTerm& term, const std::shared_ptr<Reductions>& reductions);

std::shared_ptr<Reductions> make_reductions();
at::Tensor begin_bucket(const at::Tensor& x);

}  // namespace raw

/// Returns x. Call it where a block of the model begins: when backward leaves the block, the
/// gradients since the last such place become a bucket.
template <auto L>
Tensor<L> begin_bucket(const Tensor<L>& x) {
  return assume<L>(raw::begin_bucket(x.local()));
}

}  // namespace moesh
