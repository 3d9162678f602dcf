#include "moesh/fsdp/flat.h"

#include <numeric>
#include <utility>

namespace moesh::raw {

Flat::Flat(std::vector<FlatPart> parts, int num_ranks)
    : parts_(std::move(parts)), num_ranks_(num_ranks) {
  for (int r = 0; r < num_ranks_; ++r) rank_sizes_.push_back(offset(parts_.size(), r));
}

std::int64_t Flat::numel() const {
  return std::accumulate(rank_sizes_.begin(), rank_sizes_.end(), std::int64_t{0});
}

std::int64_t Flat::length(std::size_t i, int rank) const {
  const FlatPart& p = parts_[i];
  return num_ranks_ == 1 ? p.shape[static_cast<std::size_t>(p.dim)]
                         : p.sizes[static_cast<std::size_t>(rank)];
}

std::int64_t Flat::inner(std::size_t i) const {
  std::int64_t n = 1;
  for (std::size_t d = 0; d < parts_[i].shape.size(); ++d)
    if (static_cast<std::int64_t>(d) != parts_[i].dim) n *= parts_[i].shape[d];
  return n;
}

std::int64_t Flat::offset(std::size_t i, int rank) const {
  std::int64_t sum = 0;
  for (std::size_t j = 0; j < i; ++j) sum += length(j, rank) * inner(j);
  return sum;
}

at::Tensor Flat::rows_of(const at::Tensor& message_of_rank, std::size_t i, int rank) const {
  const FlatPart& p = parts_[i];
  std::vector<std::int64_t> shape{length(i, rank)};
  for (std::size_t d = 0; d < p.shape.size(); ++d)
    if (static_cast<std::int64_t>(d) != p.dim) shape.push_back(p.shape[d]);
  return message_of_rank.narrow(0, offset(i, rank), shape[0] * inner(i)).view(shape);
}

template <class F>
void Flat::each_rank(const at::Tensor& message, std::size_t i, const F& f) const {
  if (message.is_meta()) return;  // there is nothing to copy, and an estimate may have 2048 ranks
  std::int64_t first = 0, row = 0;
  for (int r = 0; r < num_ranks_; ++r) {
    const std::int64_t size = rank_sizes_[static_cast<std::size_t>(r)];
    f(rows_of(message.narrow(0, first, size), i, r), row);
    first += size, row += length(i, r);
  }
}

void Flat::put_whole(const at::Tensor& message, std::size_t i, const at::Tensor& whole) const {
  const at::Tensor rows = whole.movedim(parts_[i].dim, 0);
  each_rank(message, i, [&](const at::Tensor& to, std::int64_t row) {
    to.copy_(rows.narrow(0, row, to.size(0)));
  });
}

void Flat::put_part(const at::Tensor& message_of_rank, std::size_t i, const at::Tensor& part,
                    int rank) const {
  rows_of(message_of_rank, i, rank).copy_(part.movedim(parts_[i].dim, 0));
}

void Flat::take_whole(const at::Tensor& message, std::size_t i, const at::Tensor& rows) const {
  each_rank(message, i, [&](const at::Tensor& from, std::int64_t row) {
    rows.narrow(0, row, from.size(0)).copy_(from);
  });
}

at::Tensor Flat::part_of_rank(const at::Tensor& message_of_rank, std::size_t i, int rank) const {
  return rows_of(message_of_rank, i, rank).movedim(0, parts_[i].dim);
}

}  // namespace moesh::raw
