#include "moesh/nn/tokens.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <algorithm>

#include "moesh/base/error.h"

namespace moesh::nn {
namespace {

// A rank is a thread; layers check values and know nothing of steps.
thread_local CheckLater* innermost = nullptr;

}  // namespace

CheckLater::CheckLater() : scope_(innermost, this) {}
CheckLater* CheckLater::current() { return innermost; }
ScopedValue<CheckLater*> CheckLater::use(CheckLater* other) { return {innermost, other}; }

void CheckLater::Checks::raise(const std::int64_t* found) const {
  for (std::size_t i = 0; i < texts.size(); ++i)
    if (found[2 * i] != 0) throw Error(ErrorKind::data, texts[i](found[2 * i + 1]));
}

void check_values(const at::Tensor& wrong, const at::Tensor& values,
                  const std::function<std::string(std::int64_t)>& text) {
  if (values.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor all = wrong.reshape({-1}).to(at::kByte);
  const at::Tensor first = all.argmax(0).reshape({1});  // of equals the first
  const at::Tensor found = at::cat(
      {all.index_select(0, first).to(at::kLong), values.reshape({-1}).index_select(0, first)});
  if (CheckLater* const current = CheckLater::current()) {
    current->checks_.found.push_back(found);
    current->checks_.texts.push_back(text);
    return;
  }
  const at::Tensor host = found.cpu();
  CheckLater::Checks{.found = {}, .texts = {text}}.raise(host.const_data_ptr<std::int64_t>());
}

using enum Place;

at::Tensor as_tensor(const PositionRanges& ranges, const at::TensorOptions& options) {
  std::vector<at::Tensor> parts;
  for (const PositionRange& r : ranges) parts.push_back(at::arange(r.begin, r.end, options));
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

Tokens::Tokens(const Mesh& mesh, std::int64_t batch, std::int64_t sequence, bool sequence_parallel,
               SequenceCut cut, const at::Tensor& valid_BL, const Documents& documents,
               std::int64_t num_before, const at::Tensor& samples_B)
    : mesh_(mesh),
      batch_(batch),
      sequence_(sequence),
      sequence_parallel_(sequence_parallel),
      cut_(cut),
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
                     own_span(starts, *this));
  positions_ = map_rows(
      [&](const at::Tensor& starts_BL) {
        return as_tensor(span_ranges(), starts_BL.options()) - starts_BL;
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
  const SequenceShard of_cp = span(mesh_.coordinate(rank, cp));
  return sequence_parallel_ ? of_cp.piece(mesh_.coordinate(rank, tp)) : of_cp;
}

PositionRanges Tokens::positions() const {
  PositionRanges ranges = span_ranges();
  for (PositionRange& r : ranges) r.begin += num_before_, r.end += num_before_;
  return ranges;
}

std::vector<PositionRanges> Tokens::spans() const {
  std::vector<PositionRanges> all;
  for (int c = 0; c < mesh_.size(cp); ++c) all.push_back(span(c).ranges());
  return all;
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

PositionRanges Tokens::one_by_one() const {
  PositionRanges all;
  for (const PositionRanges& ranges : spans()) all.insert(all.end(), ranges.begin(), ranges.end());
  return all;
}

SplitDim Tokens::over_cp() const {
  SplitDim along{.dim = 1};
  for (const PositionRanges& ranges : spans()) along.sizes.push_back(total_length(ranges));
  return along;
}

SplitDim Tokens::over_tp() const {
  const SequenceShard of_cp = span(mesh_.coordinate(cp));
  SplitDim along{.dim = 1};
  for (int t = 0; t < mesh_.size(tp); ++t) along.sizes.push_back(of_cp.piece(t).length());
  return along;
}

PerToken Tokens::own(const Tensor<Dense{T, R, R}>& x) const {
  const auto of_cp = own_span(x, *this);
  if (sequence_parallel_) return flatten(keep<tp>(of_cp, over_tp()), 0, 1);
  return keep<tp>(flatten(of_cp, 0, 1), {.dim = 0, .sizes = rows(*mesh_.group(tp))});
}

at::Tensor Tokens::numbers(const PositionRanges& ranges) const {
  if (!samples_B_.defined()) return {};
  return samples_B_.mul(sequence_).unsqueeze(1) + as_tensor(ranges, samples_B_.options());
}

at::Tensor Tokens::gathered_numbers() const {
  if (!samples_B_.defined()) return {};
  if (!sequence_parallel_) return span_numbers().flatten();
  std::vector<at::Tensor> pieces;
  const SequenceShard of_cp = span(mesh_.coordinate(cp));
  for (int t = 0; t < mesh_.size(tp); ++t)
    pieces.push_back(numbers(of_cp.piece(t).ranges()).flatten());
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
  at::Tensor places = rows.remainder(length);
  if (const PositionRanges ranges = held.ranges(); ranges.size() == 2) {
    const PositionRange &one = ranges[0], &two = ranges[1];
    places.add_(places.ge(one.length()).mul(two.begin - one.end));
  }
  return rows.div(length, "floor").mul_(sequence_).add_(places).add_(before + held.start());
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
