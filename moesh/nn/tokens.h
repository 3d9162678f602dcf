#pragma once
// The tokens of one micro-batch: which of them each rank holds, their places in the whole, and
// which of them count.

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "moesh/base/this_thread.h"
#include "moesh/comm/mesh.h"
#include "moesh/spmd/gather_ranges.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"
#include "moesh/types/token.h"

namespace moesh::nn {

using PerToken = Tensor<Dense{Place::T, Place::T, Place::T}>;  // every rank has its own tokens
using OfSpan = Tensor<Dense{Place::T, Place::T, Place::R}>;    // of the tokens of a cp rank [B, L]

/// Documents that share a sequence: a token sees only its own, and its position counts from there.
struct Documents {
  // int64 [batch, sequence], of this dp rank's sequences: where the document of each token begins,
  // by position in the sequence. Undefined: every sequence is one document.
  at::Tensor starts_BL = {};
  // The most documents that the batch may have, for kernels whose work is planned before the
  // boundaries are read; batches with the same number can use one CUDA graph.
  std::int64_t most = 0;

  bool any() const { return starts_BL.defined(); }
};

/// [length of the ranges]: these positions.
at::Tensor as_tensor(const PositionRanges& ranges, const at::TensorOptions& options);

/// Every dp rank has `batch` sequences of `sequence` tokens, and dp numbers them all. The sequence
/// is cut over cp, into spans of one range of positions or two (SequenceCut), and a span over tp.
/// With sequence parallelism a rank holds its own piece [batch, len]; without it the tp ranks hold
/// the same span [batch, span], and inside the layer each takes a flat piece of it.
class Tokens {
 public:
  /// `valid_BL` (bool, of this dp rank's sequences): the tokens that count in losses and balance,
  /// those with a label; undefined: all. `num_before`: tokens of each sequence that the model has
  /// seen already, and whose keys and values it has kept (nn/kv_cache.h). `samples_B`: the numbers
  /// of this dp rank's sequences in the run, int64; undefined: nothing depends on them.
  Tokens(const Mesh& mesh, std::int64_t batch, std::int64_t sequence, bool sequence_parallel,
         SequenceCut cut = SequenceCut::contiguous, const at::Tensor& valid_BL = {},
         const Documents& documents = {}, std::int64_t num_before = 0,
         const at::Tensor& samples_B = {});

  std::int64_t batch() const { return batch_; }
  std::int64_t sequence() const { return sequence_; }
  bool sequence_parallel() const { return sequence_parallel_; }
  /// Tokens of the residual stream [batch, length()] as this rank has it.
  std::int64_t length() const;
  /// Tokens which this rank works on inside the layer: T on every axis.
  std::int64_t num_local() const { return num_local(rank_); }
  std::int64_t num_local(int rank) const;
  /// All tokens of the micro-batch, over dp, cp and tp.
  std::int64_t num_global() const { return num_dp_ * batch_ * sequence_; }
  /// num_local of each rank of a group.
  std::vector<std::int64_t> rows(const comm::Group& group) const;

  /// How long the spans of the cp ranks are, and the pieces of this cp rank's tp ranks, of
  /// [batch, sequence, ..] along dimension 1.
  SplitDim over_cp() const;
  SplitDim over_tp() const;
  /// The positions of each cp rank's span; those of this one, and of this rank's part of the
  /// residual stream.
  std::vector<PositionRanges> spans() const;
  PositionRanges span_ranges() const { return span(mesh_.coordinate(cp)).ranges(); }
  PositionRanges mine_ranges() const { return shard(rank_).ranges(); }
  std::int64_t span_length() const { return total_length(span_ranges()); }
  std::int64_t num_before() const { return num_before_; }
  /// The span's positions counted from the beginning of the sequence, tokens before these included;
  /// rotations and masks use them.
  PositionRanges positions() const;
  /// This rank's part of the residual stream of a tensor [batch, sequence, ..] that holds this dp
  /// rank's sequences.
  at::Tensor mine(const at::Tensor& x) const { return raw::rows_at(x, 1, mine_ranges()); }
  /// The span of this cp rank, the same for its tp ranks.
  at::Tensor my_span(const at::Tensor& x) const { return raw::rows_at(x, 1, span_ranges()); }
  /// The spans of all cp ranks, one behind the other, are in order of their positions then; and the
  /// other way round.
  at::Tensor by_position(const at::Tensor& x) const { return raw::by_position(x, 1, one_by_one()); }
  at::Tensor by_span(const at::Tensor& x) const { return raw::rows_at(x, 1, one_by_one()); }

  /// [batch, sequence, D], this dp rank's sequences, which its cp and tp ranks have whole -> this
  /// rank's own tokens [num_local, D].
  PerToken own(const Tensor<Dense{Place::T, Place::R, Place::R}>& x) const;
  /// bool [num_local, 1]: which of this rank's own tokens count; undefined: all.
  const PerToken& valid_N1() const { return valid_N1_; }

  bool has_documents() const { return local(starts_).defined(); }
  std::int64_t most_documents() const { return most_documents_; }
  /// Where the document of each token of this cp rank's span begins in the sequence, which may be
  /// on another cp rank, and the token's position in it. Undefined without documents.
  const OfSpan& document_starts() const { return starts_; }
  const OfSpan& document_positions() const { return positions_; }

  /// The numbers in the run, int64 [batch, length of the ranges], of the tokens at these positions
  /// of this dp rank's sequences, which other ranks may hold; of those of this cp rank's span; and,
  /// in one row [N], of the span in the order in which a flat stream of tokens is gathered over tp.
  /// Undefined without numbers of sequences.
  at::Tensor numbers(const PositionRanges& ranges) const;
  at::Tensor span_numbers() const { return numbers(span_ranges()); }
  at::Tensor gathered_numbers() const;

  GlobalToken global(LocalToken t) const;
  /// global() of every local token, int64 [num_local].
  at::Tensor global_ids(at::Device device = at::kCPU) const;
  /// Whether the local tokens are those of the first sequence, then of the next, and so on, as many
  /// of each.
  bool has_equal_runs() const { return num_local() == batch_ * shard(rank_).length(); }
  /// The sequence of every local token among this dp rank's, int64 [num_local].
  at::Tensor sequence_ids(at::Device device = at::kCPU) const;
  /// [batch, num_local]: 1 where the local token is of the sequence, else 0; a product with it is a
  /// sum over the tokens of each sequence. Made once for all layers.
  const at::Tensor& members(at::Device device, at::ScalarType dtype) const;

 private:
  SequenceShard shard(int rank) const;
  SequenceShard span(int cp_rank) const {
    return {batch_, sequence_, mesh_.size(cp), cp_rank, mesh_.size(tp), cut_};
  }
  PositionRanges one_by_one() const;  // all spans
  std::int64_t flat_start(int rank) const;
  Tensor<Dense{Place::T, Place::R, Place::R}> whole(const at::Tensor& x_BL, at::ScalarType dtype,
                                                    const char* what) const;

  const Mesh& mesh_;
  std::int64_t batch_, sequence_;
  bool sequence_parallel_;
  SequenceCut cut_;
  int rank_;
  std::int64_t num_dp_, num_before_;
  PerToken valid_N1_;
  OfSpan starts_, positions_;
  std::int64_t most_documents_ = 0;
  at::Tensor samples_B_;
  std::shared_ptr<at::Tensor> members_ = std::make_shared<at::Tensor>();  // undefined: not made
};

/// [batch, span, ..] of each cp rank -> [batch, sequence, ..].
template <auto L>
auto whole_sequence(const Tensor<L>& x, const Tokens& tokens) {
  return map_rows([&](const at::Tensor& t) { return tokens.by_position(t); },
                  all_gather<cp>(x, tokens.over_cp()));
}
/// [batch, sequence, ..], which all cp ranks have -> [batch, span, ..].
template <auto L>
auto own_span(const Tensor<L>& x, const Tokens& tokens) {
  return keep<cp>(map_rows([&](const at::Tensor& t) { return tokens.by_span(t); }, x),
                  tokens.over_cp());
}

// Checks of values that are on the device, without a wait for each.

/// Throws Error (data) with text(v) where some element is wrong, v being the first that is. `wrong`
/// is bool, of the shape of `values`, which are int64. Under a CheckLater of this thread it throws
/// later.
void check_values(const at::Tensor& wrong, const at::Tensor& values,
                  const std::function<std::string(std::int64_t)>& text);

/// While it lives, checks of this thread are noted and not made: code that has read `found` from
/// the device, with whatever else it reads there, calls `raise`.
class CheckLater {
 public:
  CheckLater();

  /// The checks so far. They outlive the scope.
  struct Checks {
    std::vector<at::Tensor> found;  // int64 [2] of each: whether a value is wrong, and which
    std::vector<std::function<std::string(std::int64_t)>> texts;

    /// `found` of all of them, one after the other, on the host. Throws the first that has failed.
    void raise(const std::int64_t* found) const;
  };
  const Checks& checks() const { return checks_; }

  /// That of this thread; null: none.
  static CheckLater* current();
  /// While the result lives, this thread has that of another one, which works for the same rank.
  static ScopedValue<CheckLater*> use(CheckLater* other);

 private:
  friend void check_values(const at::Tensor&, const at::Tensor&,
                           const std::function<std::string(std::int64_t)>&);
  Checks checks_;
  ScopedValue<CheckLater*> scope_;
};

}  // namespace moesh::nn
