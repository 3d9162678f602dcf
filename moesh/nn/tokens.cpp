#include "moesh/nn/tokens.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {

using enum Place;

Tokens::Tokens(const Mesh& mesh, std::int64_t batch, std::int64_t sequence, bool sequence_parallel,
               const at::Tensor& valid_BL, const Documents& documents, std::int64_t num_before,
               const at::Tensor& samples_B)
    : mesh_(mesh),
      batch_(batch),
      sequence_(sequence),
      sequence_parallel_(sequence_parallel),
      rank_(mesh.rank()),
      num_dp_(mesh.size(dp)),
      num_before_(num_before),
      samples_B_(samples_B) {
  MOESH_CHECK(!samples_B.defined() || samples_B.sizes() == at::IntArrayRef({batch}),
              ErrorKind::config, "tokens: the numbers of ", batch, " sequences are given as ",
              samples_B.sizes());
  if (valid_BL.defined()) valid_N1_ = own(whole(valid_BL, at::kBool, "which of them count"));
  if (!documents.any()) return;
  most_documents_ = documents.most;
  const auto starts = whole(documents.starts_BL, at::kLong, "where their documents begin");
  starts_ = map_rows([](const at::Tensor& t) { return t.squeeze(2).contiguous(); },
                     keep<cp>(starts, over_cp()));
  positions_ = map_rows(
      [&](const at::Tensor& starts_BL) {
        return at::arange(span_start(), span_start() + span_length(), starts_BL.options()) -
               starts_BL;
      },
      starts_);
}

// [batch, sequence, 1]. A dp rank has its own sequences, and what is known of their tokens is the
// same on its cp and tp ranks.
Tensor<Dense{T, R, R}> Tokens::whole(const at::Tensor& x_BL, at::ScalarType dtype,
                                     const char* what) const {
  MOESH_CHECK(x_BL.sizes() == at::IntArrayRef({batch_, sequence_}) && x_BL.scalar_type() == dtype,
              ErrorKind::config, "tokens: ", what, " is given as ", x_BL.scalar_type(), " ",
              x_BL.sizes(), "; it takes ", dtype, " [", batch_, ", ", sequence_, "]");
  return assume<Dense{T, R, R}>(x_BL.unsqueeze(2));
}

SequenceShard Tokens::shard(int rank) const {
  if (sequence_parallel_)
    return SequenceShard(batch_, sequence_, mesh_.size(kSequenceAxes),
                         mesh_.coordinate(rank, kSequenceAxes));
  return SequenceShard(batch_, sequence_, mesh_.size(cp), mesh_.coordinate(rank, cp),
                       /*width=*/mesh_.size(tp));
}

std::int64_t Tokens::length() const { return shard(rank_).length(); }

// Without sequence parallelism the tokens of the cp span are cut flat over tp.
std::int64_t Tokens::flat_start(int rank) const {
  return sequence_parallel_
             ? 0
             : Pieces{shard(rank).num_local(), mesh_.size(tp)}.start(mesh_.coordinate(rank, tp));
}

std::int64_t Tokens::num_local(int rank) const {
  const std::int64_t held = shard(rank).num_local();
  return sequence_parallel_ ? held
                            : Pieces{held, mesh_.size(tp)}.length(mesh_.coordinate(rank, tp));
}

std::vector<std::int64_t> Tokens::rows(const comm::Group& group) const {
  if (group.size() == 1) return {num_local()};
  std::vector<std::int64_t> all;
  for (int member : group.members()) all.push_back(num_local(member));
  return all;
}

SplitDim Tokens::over_cp() const {
  const int num_cp = mesh_.size(cp), num_tp = mesh_.size(tp);
  SplitDim along{.dim = 1};
  for (int c = 0; c < num_cp; ++c)
    along.sizes.push_back(SequenceShard(batch_, sequence_, num_cp, c, num_tp).length());
  return along;
}

SplitDim Tokens::over_tp() const {
  const int num_tp = mesh_.size(tp), first = mesh_.coordinate(cp) * num_tp;
  SplitDim along{.dim = 1};
  for (int t = 0; t < num_tp; ++t)
    along.sizes.push_back(
        SequenceShard(batch_, sequence_, mesh_.size(kSequenceAxes), first + t).length());
  return along;
}

PerToken Tokens::own(const Tensor<Dense{T, R, R}>& x) const {
  const auto span = keep<cp>(x, over_cp());
  if (sequence_parallel_) return flatten(keep<tp>(span, over_tp()), 0, 1);
  return keep<tp>(flatten(span, 0, 1), {.dim = 0, .sizes = rows(*mesh_.group(tp))});
}

at::Tensor Tokens::numbers(std::int64_t begin, std::int64_t end) const {
  if (!samples_B_.defined()) return {};
  return samples_B_.mul(sequence_).unsqueeze(1) + at::arange(begin, end, samples_B_.options());
}

at::Tensor Tokens::gathered_numbers() const {
  if (!samples_B_.defined()) return {};
  if (!sequence_parallel_) return span_numbers().flatten();
  std::vector<at::Tensor> pieces;
  std::int64_t begin = span_start();
  for (const std::int64_t length : over_tp().sizes) {
    pieces.push_back(numbers(begin, begin + length).flatten());
    begin += length;
  }
  return at::cat(pieces);
}

GlobalToken Tokens::global(LocalToken t) const {
  const SequenceShard held = shard(rank_);
  const std::int64_t before = mesh_.coordinate(dp) * batch_ * sequence_;
  return {before + held.global(LocalToken{flat_start(rank_) + t.value}).value};
}

// Made where they are used: a copy from the host would be a wait, and no part of a CUDA graph.
at::Tensor Tokens::global_ids(at::Device device) const {
  const SequenceShard held = shard(rank_);
  const std::int64_t first = flat_start(rank_), length = std::max<std::int64_t>(held.length(), 1),
                     before = mesh_.coordinate(dp) * batch_ * sequence_;
  const at::Tensor rows =
      at::arange(first, first + num_local(), at::TensorOptions(device).dtype(at::kLong));
  return rows.div(length, "floor")
      .mul_(sequence_)
      .add_(rows.remainder(length))
      .add_(before + held.start());
}

at::Tensor Tokens::sequence_ids(at::Device device) const {
  const std::int64_t first = mesh_.coordinate(dp) * batch_;
  return global_ids(device).div(sequence_, "floor").sub_(first);
}

const at::Tensor& Tokens::members(at::Device device, at::ScalarType dtype) const {
  if (!members_->defined() || members_->device() != device || members_->scalar_type() != dtype) {
    const at::Tensor ids = sequence_ids(device);
    *members_ = (at::arange(batch_, ids.options()).unsqueeze(1) == ids).to(dtype);
  }
  return *members_;
}

}  // namespace moesh::nn
