#pragma once
// Several tensors, each divided among ranks along a dimension of its own, as one message: first all
// that belongs to rank 0, tensor after tensor, then all of rank 1, and so on.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace moesh::raw {

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
