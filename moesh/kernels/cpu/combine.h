#pragma once
// Products of rows whose results belong to tokens.

#include <ATen/ops/empty.h>

#include <array>

#include "moesh/kernels/cpu/job.h"

namespace moesh::kernels::cpu {

// Their float32 sums of one panel are half of a second-level cache.
constexpr int64_t kChunkTokens = 2048;

/// out[t] = sum over the terms and over the rows of token t: a w. Tasks (token chunk, panel of D),
/// each owning its rectangle. Groups come one after another; the terms hold the rows of the current
/// one.
template <class T, int kTerms>
class Combine {
  using A = Accumulate<T>;
  static constexpr bool kInPlace = std::is_same_v<T, A>;  // out is where the sums are made

 public:
  struct Term {
    const T* a;  // [rows of the group, depth], stride lda
    int64_t lda;
    Right<T> right;
  };

  /// bias [e, D] is added to each row, times the row's score if there are `scores`.
  Combine(const ExpertsJob<T>& job, std::array<Term, kTerms> terms, const A* bias, const A* scores,
          T* out)
      : job_(job), terms_(terms), bias_(bias), scores_(scores), out_(out) {
    // Enough tasks for all threads; the sums do not depend on how they are divided.
    const int64_t wanted = 2 * at::get_num_threads();
    length_ = job.indexed ? job.num_tokens : job.most_group_rows();
    const auto num = [&] { return divide_up(length_, chunk_) * divide_up(job.D, width_); };
    while (num() < wanted && width_ > 32) width_ /= 2;
    while (num() < wanted && chunk_ > 128) chunk_ /= 2;
    num_panels_ = divide_up(job.D, width_);
    if (job.indexed && !kInPlace) {
      sums_holder_ = at::empty({num_panels_, job.num_tokens, width_}, job.b1_holder.options());
      sums_ = data<A>(sums_holder_);
    }
  }

  int64_t num_tasks() const { return divide_up(length_, chunk_) * num_panels_; }

  int64_t scratch_bytes() const {
    int64_t bytes = space<A>(kBlockRows * kPanel);
    for (const auto& term : terms_) bytes += space<T>(Panel<T>::size(term.right.depth()));
    return bytes;
  }

  void run(int64_t task, const ExpertGroup& group, Arena arena) const {
    const int64_t c0 = task % num_panels_ * width_, n = std::min(width_, job_.D - c0);
    std::vector<Panel<T>> panels;
    for (const auto& term : terms_) panels.emplace_back(term.right, Walk::experts, arena);
    A* c = arena.take<A>(kBlockRows * kPanel);
    const int64_t begin = task / num_panels_ * chunk_;
    if (!job_.indexed) {
      const int64_t r0 = group.begin + begin, r1 = std::min(r0 + chunk_, group.end);
      for (int64_t e = group.expert_begin; e < group.expert_end; ++e) {
        each_block(e, std::max(r0, job_.first[e]), std::min(r1, job_.first[e + 1]), group, c0, n,
                   panels, c, [&](int64_t r, int64_t m, const A* scores, const A* bias) {
                     simd_ops<T>().put_rows(c, kPanel, m, n, scores, bias, out_ + r * job_.D + c0,
                                            job_.D);
                   });
      }
      return;
    }
    const int64_t t0 = begin, t1 = std::min(t0 + chunk_, job_.num_tokens);
    A* sums;
    int64_t ld = width_;
    if constexpr (kInPlace)
      sums = out_ + t0 * job_.D + c0, ld = job_.D;
    else
      sums = sums_ + (task % num_panels_ * job_.num_tokens + t0) * width_;
    if (&group == &job_.groups.front()) {
      for (int64_t t = 0; t < t1 - t0; ++t) std::fill_n(sums + t * ld, n, A(0));
    }
    for (int64_t e = group.expert_begin; e < group.expert_end; ++e) {
      const int32_t* last = job_.token + job_.first[e + 1];
      const int32_t* from = std::lower_bound(job_.token + job_.first[e], last, t0);
      const int32_t* to = std::lower_bound(from, last, t1);
      each_block(e, from - job_.token, to - job_.token, group, c0, n, panels, c,
                 [&](int64_t r, int64_t m, const A* scores, const A* bias) {
                   simd_ops<T>().add_rows(c, kPanel, m, n, job_.token + r, t0, scores, bias, sums,
                                          ld);
                 });
    }
    if constexpr (!kInPlace) {
      if (&group == &job_.groups.back())
        simd_ops<T>().put_rows(sums, ld, t1 - t0, n, nullptr, nullptr, out_ + t0 * job_.D + c0,
                               job_.D);
    }
  }

 private:
  /// Multiplies rows [begin, end) of an expert into c, block by block, and calls f(first row, rows,
  /// scores, bias) for each.
  template <class F>
  void each_block(int64_t e, int64_t begin, int64_t end, const ExpertGroup& group, int64_t c0,
                  int64_t n, std::vector<Panel<T>>& panels, A* c, const F& f) const {
    for (int64_t r = begin; r < end; r += kBlockRows) {
      const int64_t m = std::min(kBlockRows, end - r);
      for (int i = 0; i < kTerms; ++i) {
        const Term& term = terms_[i];
        multiply<T>(m, n, c0, term.a + (r - group.kept_from) * term.lda, term.lda, term.right,
                    panels[i], e, c, kPanel, i > 0);
      }
      f(r, m, scores_ ? scores_ + r : nullptr, bias_ ? bias_ + e * job_.D + c0 : nullptr);
    }
  }

  const ExpertsJob<T>& job_;
  std::array<Term, kTerms> terms_;
  const A* bias_;
  const A* scores_;
  T* out_;
  at::Tensor sums_holder_;  // [panels, T, panel width], where out is too coarse for sums
  A* sums_ = nullptr;
  int64_t width_ = kPanel, chunk_ = kChunkTokens, length_, num_panels_;
};

}  // namespace moesh::kernels::cpu
