#pragma once
// One call of the experts: its sizes and pointers, and how its rows are divided into blocks.
// T tokens, D model, F ffn, e local experts, R rows at their experts

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "moesh/base/error.h"
#include "moesh/kernels/check.h"
#include "moesh/kernels/cpu/operands.h"
#include "moesh/kernels/cpu/tasks.h"
#include "moesh/kernels/experts.h"

namespace moesh::kernels::cpu {

// Rows of a block: packing a panel is then 1 % of using it.
constexpr int64_t kBlockRows = 256;
// Memory between two GEMMs for a group of experts: a small part of a last-level cache.
constexpr int64_t kGroupBytes = 1 << 22;
constexpr int64_t kSmallWork = 1 << 20;  // operations: ten microseconds of one core

/// Rows [begin, end) of one expert.
struct RowBlock {
  int64_t expert, begin, end;
  int64_t rows() const { return end - begin; }
};

/// Experts [expert_begin, expert_end), which hold rows [begin, end) in blocks [block_begin,
/// block_end).
struct ExpertGroup {
  int64_t expert_begin, expert_end, begin, end, block_begin, block_end;
  int64_t kept_from;  // the row that is first in what lies between two GEMMs
  int64_t rows() const { return end - begin; }
  int64_t num_blocks() const { return block_end - block_begin; }
};

template <class T>
T* data(const at::Tensor& t) {
  return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

/// One call: sizes and pointers.
template <class T>
struct ExpertsJob {
  using A = Accumulate<T>;
  int64_t num_experts, F, D, R, num_tokens;
  int64_t Fp;  // stride of [R, F] tensors that are left operands
  bool clamped;
  const T *w1, *w3, *w2;
  at::Tensor b1_holder, b3_holder, b2_holder, scores_holder;
  const A *b1, *b3, *b2;  // b1 and b3 are zeros if there are none, b2 is null
  const A *pre, *post;    // scores [R], on the side where they act
  bool indexed;           // row r is token[r]; else rows are given as they are
  const int32_t* token;
  std::vector<int64_t> first;  // [e + 1] first row of each expert
  std::vector<RowBlock> blocks;
  std::vector<ExpertGroup> groups;  // at least one, also if there are no experts

  ExpertsJob(const ExpertsConfig& config, const ExpertsWeights& w, const ExpertsInput& in) {
    num_experts = w.w1_eFD.size(0), F = w.w1_eFD.size(1), D = w.w1_eFD.size(2), Fp = padded<T>(F);
    num_tokens = in.x.size(0), R = in.token_R.defined() ? in.token_R.size(0) : num_tokens;
    clamped = config.activation == Activation::clamped_swiglu;
    w1 = data<T>(w.w1_eFD), w3 = data<T>(w.w3_eFD), w2 = data<T>(w.w2_eDF);
    const auto wide = sizeof(A) == 8 ? at::kDouble : at::kFloat;
    b1_holder = w.b1_eF.defined() ? w.b1_eF.to(wide) : at::zeros({num_experts, F}, wide);
    b3_holder = w.b3_eF.defined() ? w.b3_eF.to(wide) : at::zeros({num_experts, F}, wide);
    if (w.b2_eD.defined()) b2_holder = w.b2_eD.to(wide);
    b1 = data<A>(b1_holder), b3 = data<A>(b3_holder), b2 = data<A>(b2_holder);
    scores_holder = in.scores_R;
    pre = config.scores == ScoreSide::before ? data<A>(scores_holder) : nullptr;
    post = config.scores == ScoreSide::after ? data<A>(scores_holder) : nullptr;
    indexed = in.token_R.defined();  // not told by the pointer: that of an empty tensor is null
    token = data<int32_t>(in.token_R);
    first = first_rows(in.ends_e, R);
    groups.assign(1, {});
    const int64_t row_bytes = 3 * std::max<int64_t>(1, Fp) * static_cast<int64_t>(sizeof(T));
    const int64_t group_rows = std::min(
        std::max(kGroupBytes / row_bytes, 4 * at::get_num_threads() * kBlockRows), divide_up(R, 2));
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t count = rows_of(e);
      if (groups.back().rows() > 0 && groups.back().rows() + count > group_rows) {
        const int64_t block = static_cast<int64_t>(blocks.size());
        groups.push_back({e, e, first[e], first[e], block, block, first[e]});
      }
      const int64_t parts = divide_up(count, kBlockRows),
                    rows = parts ? divide_up(count, parts) : 0;
      for (int64_t begin = first[e]; begin < first[e + 1]; begin += rows) {
        blocks.push_back({e, begin, std::min(begin + rows, first[e + 1])});
      }
      groups.back().expert_end = e + 1, groups.back().end = first[e + 1];
      groups.back().block_end = static_cast<int64_t>(blocks.size());
    }
    if (indexed) check_tokens();
  }

  /// The results between two GEMMs are kept, for the rows of all groups.
  void keep_all_rows() {
    for (ExpertGroup& g : groups) g.kept_from = 0;
  }

  int64_t rows_of(int64_t expert) const { return first[expert + 1] - first[expert]; }
  int64_t most_rows() const {
    int64_t most = 0;
    for (int64_t e = 0; e < num_experts; ++e) most = std::max(most, rows_of(e));
    return most;
  }
  int64_t most_block_rows() const { return std::min(kBlockRows, most_rows()); }
  int64_t most_group_rows() const {
    int64_t most = 0;
    for (const ExpertGroup& g : groups) most = std::max(most, g.rows());
    return most;
  }
  /// Workers for this many tasks: one if all the work costs less than waking another.
  int64_t workers(int64_t num_tasks) const {
    return 6 * R * F * D < kSmallWork ? 1 : num_workers(num_tasks);
  }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks.size()); }
  RowView<T> rows(const at::Tensor& x) const { return {data<T>(x), D, token}; }

  // Both the ranges of Combine and the safety of every gather rest on this.
  void check_tokens() const {
    for (int64_t e = 0; e < num_experts; ++e) {
      for (int64_t r = first[e]; r < first[e + 1]; ++r) {
        MOESH_CHECK(token[r] >= 0 && token[r] < num_tokens, ErrorKind::data, "token_R[", r, "] is ",
                    token[r], ", outside of the ", num_tokens,
                    " tokens of x; pass token_R and x of the same routing");
        MOESH_CHECK(r == first[e] || token[r] >= token[r - 1], ErrorKind::data, "token_R[", r,
                    "] is ", token[r], " after ", token[r - 1], " within expert ", e,
                    "; the rows of an expert are sorted by token, as sort_by_expert leaves them");
      }
    }
  }
};

}  // namespace moesh::kernels::cpu
