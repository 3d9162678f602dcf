// Grouped SwiGLU on the CPU. Every GEMM is made of small ones: a block of rows (gathered, if rows are indices into tokens) times
// a panel of 64 columns of a weight, packed as the library's microkernels want it. Both live in the caches of one core.
//
// Experts go through in groups, so that what lies between two GEMMs stays in the cache and is never as large as [R, F]:
//   forward   1  (expert, row block)       g, u = x w1', x w3';  h = act(g, u)
//             2  (token chunk, D panel)    y += h w2'                               experts in order
//   backward  1  (expert, row block)       dh = dy w2;  dg, du, h, d(score), parts of d(bias)
//             2  (expert, tile)            dw2 = dy' h;  dw1 = dg' x;  dw3 = du' x
//                (token chunk, D panel)    dx += dg w1 + du w3                      experts in order
// A task of the last kind owns a rectangle of the output and visits all experts of the group: rows of one expert are sorted by
// token, so those of a chunk of tokens are one range. So K rows meet in one token without a scatter, a lock or an [R, D]
// tensor, and in an order which depends on nothing but the routing.
// T tokens, D model, F ffn, e local experts, K top-k, R rows at their experts

#include "moesh/kernels/experts.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/kernels/cpu/arena.h"
#include "moesh/kernels/cpu/cpu.h"
#include "moesh/kernels/cpu/gemm.h"
#include "moesh/kernels/cpu/memory.h"
#include "moesh/kernels/cpu/tasks.h"

namespace moesh::kernels::cpu {
namespace {

using std::int64_t;

constexpr int64_t kPanel = 64;          // columns of a B panel: four vectors
constexpr int64_t kBlockRows = 256;     // rows of a block: packing a panel is then 1 % of using it
constexpr int64_t kPanelBytes = 1 << 18;  // a quarter of a second-level cache
constexpr int64_t kChunkTokens = 2048;  // their float32 sums of one panel are half of one
constexpr int64_t kTile = 256;          // rows of a tile of a weight gradient
constexpr int64_t kTileElements = 1 << 20;
constexpr int64_t kStreamBytes = 1 << 24;  // weight gradients of this size would leave the cache anyway
constexpr int64_t kGroupBytes = 1 << 23;  // dg, du and h of a group of experts: a quarter of a last-level cache

template <class T>
constexpr int64_t kDepth = kPanelBytes / (kPanel * static_cast<int64_t>(sizeof(T)));

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
bool wants_pairs() {
  return sizeof(T) == 2 && gemm_wants_pairs();
}

// The inner dimension as the GEMM sees it.
template <class T>
int64_t padded(int64_t k) {
  return wants_pairs<T>() ? k + k % 2 : k;
}

/// Rows [begin, end) of one expert.
struct Block {
  int64_t expert, begin, end;
  int64_t rows() const { return end - begin; }
};

/// Experts [expert_begin, expert_end), which hold rows [begin, end) in blocks [block_begin, block_end).
struct Group {
  int64_t expert_begin, expert_end, begin, end, block_begin, block_end;
  int64_t rows() const { return end - begin; }
  int64_t num_blocks() const { return block_end - block_begin; }
};

template <class T>
T* data(const at::Tensor& t) {
  return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

/// A weight [e, rows, columns] as the right operand: itself (inner dimension is its rows), or transposed.
template <class T>
struct Right {
  const T* data;
  int64_t rows, columns;
  bool transposed;
  int64_t depth() const { return transposed ? columns : rows; }
};

/// In which order panels are asked for: all columns of one expert, or the same columns of one expert after another.
enum class Walk { columns, experts };

/// Packs panels of a Right, and remembers the last one.
template <class T>
class Panel {
 public:
  static int64_t size(int64_t depth) { return std::min(padded<T>(depth), kDepth<T>) * kPanel; }
  Panel(const Right<T>& right, Walk walk, Arena& arena) : right_(right), walk_(walk), memory_(arena.take<T>(size(right.depth()))) {}

  struct Operand {
    const T* data;
    int64_t ld;
  };
  /// Inner rows [k0, k0 + k), columns [c0, c0 + n) of the weight of `expert`.
  Operand get(int64_t expert, int64_t k0, int64_t k, int64_t c0, int64_t n) {
    const int64_t size = right_.rows * right_.columns;
    const T* w = right_.data + expert * size + (right_.transposed ? c0 * right_.columns + k0 : k0 * right_.columns + c0);
    const bool pairs = wants_pairs<T>();
    if (!right_.transposed && !pairs) return {w, right_.columns};  // a copy would cost more than it saves
    if (expert != expert_ || k0 != k0_ || c0 != c0_) {
      const T* next = w + (walk_ == Walk::experts ? size : right_.transposed ? n * right_.columns : n);
      if (right_.transposed) simd_ops<T>().pack_transposed(w, next, right_.columns, n, k, pairs, memory_, kPanel);
      else simd_ops<T>().pack({w, right_.columns, nullptr}, next, k, n, pairs, memory_, kPanel);
      expert_ = expert, k0_ = k0, c0_ = c0;
    }
    return {memory_, kPanel};
  }

 private:
  const Right<T>& right_;
  Walk walk_;
  T* memory_;
  int64_t expert_ = -1, k0_ = -1, c0_ = -1;
};

/// c [m, n] (+)= a [m, depth] times columns [c0, c0 + n) of the expert's weight.
template <class T>
void multiply(int64_t m, int64_t n, int64_t c0, const T* a, int64_t lda, const Right<T>& right, Panel<T>& panel, int64_t expert,
              Accumulate<T>* c, int64_t ldc, bool add) {
  if (right.depth() == 0 && !add) {  // a rank that has none of the F: its products are zero
    for (int64_t r = 0; r < m; ++r) std::fill_n(c + r * ldc, n, Accumulate<T>(0));
  }
  for (int64_t k0 = 0; k0 < right.depth(); k0 += kDepth<T>) {
    const int64_t k = std::min(kDepth<T>, right.depth() - k0);
    const auto b = panel.get(expert, k0, k, c0, n);
    gemm<T>(m, n, padded<T>(k), a + k0, lda, b.data, b.ld, c, ldc, add || k0 > 0);
  }
}

/// c [m, n] (+)= a [m, k] b [k, n] for any k: the library sees few different ones.
template <class T>
void multiply_pieces(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, Accumulate<T>* c, int64_t ldc,
                     bool add) {
  for (int64_t piece = 1024; k > 0;) {
    while (piece > k && piece > 64) piece /= 2;
    const int64_t now = k < 64 ? k : piece;
    gemm<T>(m, n, now, a, lda, b, ldb, c, ldc, add);
    a += now, b += now * ldb, k -= now, add = true;
  }
}

/// The rows as a left operand: in place if they can be, else gathered into `scratch` (stride padded(columns)).
template <class T>
typename Panel<T>::Operand left_operand(RowView<T> rows, int64_t m, int64_t columns, T* scratch) {
  const int64_t ld = padded<T>(columns);
  if (!rows.index && ld == columns) return {rows.data, rows.stride};
  for (int64_t r = 0; r < m; ++r) {
    std::memcpy(scratch + r * ld, rows.row(r), static_cast<size_t>(columns) * sizeof(T));
    if (ld > columns) scratch[r * ld + columns] = T{};
  }
  return {scratch, ld};
}

/// One call: sizes and pointers.
template <class T>
struct Job {
  using A = Accumulate<T>;
  int64_t num_experts, F, D, R, num_tokens, Fp;  // Fp: stride of [R, F] tensors that are left operands
  bool clamped;
  const T *w1, *w3, *w2;
  at::Tensor b1_holder, b3_holder, b2_holder, scores_holder;
  const A *b1, *b3, *b2;       // b1 and b3 are zeros if there are none, b2 is null
  const A *pre, *post;         // scores [R], on the side where they act
  bool indexed;                // row r is token[r]; else rows are given as they are
  const int64_t* token;
  std::vector<int64_t> first;  // [e + 1] first row of each expert
  std::vector<Block> blocks;
  std::vector<Group> groups;   // at least one, also if there are no experts

  Job(const ExpertsConfig& config, const ExpertsWeights& w, const ExpertsInput& in) {
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
    indexed = in.token_R.defined(), token = data<int64_t>(in.token_R);  // the pointer of an empty tensor is null
    const int64_t* counts = data<int64_t>(in.counts_e);
    first.assign(1, 0);
    groups.assign(1, {});
    const int64_t group_rows =
        std::max(kGroupBytes / (3 * Fp * static_cast<int64_t>(sizeof(T))), 4 * at::get_num_threads() * kBlockRows);
    for (int64_t e = 0; e < num_experts; ++e) {
      if (groups.back().rows() > 0 && groups.back().rows() + counts[e] > group_rows) {
        const int64_t block = static_cast<int64_t>(blocks.size());
        groups.push_back({e, e, first[e], first[e], block, block});
      }
      first.push_back(first.back() + counts[e]);
      const int64_t parts = divide_up(counts[e], kBlockRows), rows = parts ? divide_up(counts[e], parts) : 0;
      for (int64_t begin = first[e]; begin < first[e + 1]; begin += rows) {
        blocks.push_back({e, begin, std::min(begin + rows, first[e + 1])});
      }
      groups.back().expert_end = e + 1, groups.back().end = first[e + 1];
      groups.back().block_end = static_cast<int64_t>(blocks.size());
    }
    if (indexed) check_tokens();
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
    for (const Group& g : groups) most = std::max(most, g.rows());
    return most;
  }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks.size()); }
  RowView<T> rows(const at::Tensor& x) const { return {data<T>(x), D, token}; }

  // Both the ranges of multiply_and_combine and the safety of every gather rest on this.
  void check_tokens() const {
    for (int64_t e = 0; e < num_experts; ++e) {
      for (int64_t r = first[e]; r < first[e + 1]; ++r) {
        MOESH_CHECK(token[r] >= 0 && token[r] < num_tokens, ErrorKind::data, "token_R[", r, "] is ", token[r], ", outside of the ",
                    num_tokens, " tokens of x; pass token_R and x of the same routing");
        MOESH_CHECK(r == first[e] || token[r] >= token[r - 1], ErrorKind::data, "token_R[", r, "] is ", token[r], " after ", token[r - 1],
                    " within expert ", e, "; the rows of an expert are sorted by token, as sort_by_expert leaves them");
      }
    }
  }
};

/// out[t] = sum over the terms and over the rows of token t: a w. Tasks (token chunk, panel of D), each owning its rectangle.
/// Groups come one after another; the terms hold the rows of the current one.
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
  Combine(const Job<T>& job, std::array<Term, kTerms> terms, const A* bias, const A* scores, T* out)
      : job_(job), terms_(terms), bias_(bias), scores_(scores), out_(out) {
    // Enough tasks for all threads; the sums are the same whatever the cut.
    const int64_t wanted = 2 * at::get_num_threads();
    length_ = job.indexed ? job.num_tokens : job.most_group_rows();
    const auto num = [&] { return divide_up(length_, chunk_) * divide_up(job.D, width_); };
    while (num() < wanted && width_ > 32) width_ /= 2;
    while (num() < wanted && chunk_ > 128) chunk_ /= 2;
    num_panels_ = divide_up(job.D, width_);
    if (job.indexed && !kInPlace) {
      sums_holder_ = large_empty({num_panels_, job.num_tokens, width_}, job.b1_holder.options());
      sums_ = data<A>(sums_holder_);
    }
  }

  int64_t num_tasks() const { return divide_up(length_, chunk_) * num_panels_; }

  int64_t scratch_bytes() const {
    int64_t bytes = space<A>(kBlockRows * kPanel);
    for (const auto& term : terms_) bytes += space<T>(Panel<T>::size(term.right.depth()));
    return bytes;
  }

  void run(int64_t task, const Group& group, Arena arena) const {
    const int64_t c0 = task % num_panels_ * width_, n = std::min(width_, job_.D - c0);
    std::vector<Panel<T>> panels;
    for (const auto& term : terms_) panels.emplace_back(term.right, Walk::experts, arena);
    A* c = arena.take<A>(kBlockRows * kPanel);
    const int64_t begin = task / num_panels_ * chunk_;
    if (!job_.indexed) {
      const int64_t r0 = group.begin + begin, r1 = std::min(r0 + chunk_, group.end);
      for (int64_t e = group.expert_begin; e < group.expert_end; ++e) {
        each_block(e, std::max(r0, job_.first[e]), std::min(r1, job_.first[e + 1]), group, c0, n, panels, c,
                   [&](int64_t r, int64_t m, const A* scores, const A* bias) {
                     simd_ops<T>().put_rows(c, kPanel, m, n, scores, bias, out_ + r * job_.D + c0, job_.D);
                   });
      }
      return;
    }
    const int64_t t0 = begin, t1 = std::min(t0 + chunk_, job_.num_tokens);
    A* sums;
    int64_t ld = width_;
    if constexpr (kInPlace) sums = out_ + t0 * job_.D + c0, ld = job_.D;
    else sums = sums_ + (task % num_panels_ * job_.num_tokens + t0) * width_;
    if (&group == &job_.groups.front()) {
      for (int64_t t = 0; t < t1 - t0; ++t) std::fill_n(sums + t * ld, n, A(0));
    }
    for (int64_t e = group.expert_begin; e < group.expert_end; ++e) {
      const int64_t* last = job_.token + job_.first[e + 1];
      const int64_t* from = std::lower_bound(job_.token + job_.first[e], last, t0);
      const int64_t* to = std::lower_bound(from, last, t1);
      each_block(e, from - job_.token, to - job_.token, group, c0, n, panels, c, [&](int64_t r, int64_t m, const A* scores, const A* bias) {
        simd_ops<T>().add_rows(c, kPanel, m, n, job_.token + r, t0, scores, bias, sums, ld);
      });
    }
    if constexpr (!kInPlace) {
      if (&group == &job_.groups.back()) simd_ops<T>().put_rows(sums, ld, t1 - t0, n, nullptr, nullptr, out_ + t0 * job_.D + c0, job_.D);
    }
  }

 private:
  /// Multiplies rows [begin, end) of an expert into c, block by block, and calls f(first row, rows, scores, bias) for each.
  template <class F>
  void each_block(int64_t e, int64_t begin, int64_t end, const Group& group, int64_t c0, int64_t n, std::vector<Panel<T>>& panels, A* c,
                  const F& f) const {
    for (int64_t r = begin; r < end; r += kBlockRows) {
      const int64_t m = std::min(kBlockRows, end - r);
      for (int i = 0; i < kTerms; ++i) {
        const Term& term = terms_[i];
        multiply<T>(m, n, c0, term.a + (r - group.begin) * term.lda, term.lda, term.right, panels[i], e, c, kPanel, i > 0);
      }
      f(r, m, scores_ ? scores_ + r : nullptr, bias_ ? bias_ + e * job_.D + c0 : nullptr);
    }
  }

  const Job<T>& job_;
  std::array<Term, kTerms> terms_;
  const A* bias_;
  const A* scores_;
  T* out_;
  at::Tensor sums_holder_;  // [panels, T, panel width], where out is too coarse for sums
  A* sums_ = nullptr;
  int64_t width_ = kPanel, chunk_ = kChunkTokens, length_, num_panels_;
};

template <class T>
ExpertsOutput forward(const ExpertsConfig& config, const ExpertsWeights& weights, const ExpertsInput& input) {
  using A = Accumulate<T>;
  const Job<T> job(config, weights, input);
  const auto& ops = simd_ops<T>();
  const int64_t F = job.F, D = job.D;
  ExpertsOutput out{large_empty_like(input.x), {input, large_empty({job.R, F}, input.x.options()), large_empty({job.R, F}, input.x.options())}};
  T* gate = data<T>(out.saved.gate_RF);
  T* up = data<T>(out.saved.up_RF);
  const at::Tensor h_holder = large_empty({job.most_group_rows(), job.Fp}, input.x.options());
  T* h = data<T>(h_holder);

  const RowView<T> x = job.rows(input.x);
  const Right<T> w1{job.w1, F, D, true}, w3{job.w3, F, D, true};
  const int64_t most = job.most_block_rows();
  const int64_t bytes = space<T>(most * padded<T>(D)) + 2 * space<T>(Panel<T>::size(D)) + space<A>(2 * most * kPanel);
  const Combine<T, 1> down(job, {{{h, job.Fp, Right<T>{job.w2, D, F, true}}}}, job.b2, job.post, data<T>(out.y));
  const Scratch scratch(std::max(job.num_blocks(), down.num_tasks()), std::max(bytes, down.scratch_bytes()));

  const auto up_and_gate = [&](const Block& block, const Group& group, Arena arena) {
    const int64_t m = block.rows(), r0 = block.begin;
    T* h_block = h + (r0 - group.begin) * job.Fp;
    const auto a = left_operand(x.from(r0, 0), m, D, arena.take<T>(most * padded<T>(D)));
    Panel<T> gate_panel(w1, Walk::columns, arena), up_panel(w3, Walk::columns, arena);
    A* c = arena.take<A>(2 * most * kPanel);
    for (int64_t f0 = 0; f0 < F; f0 += kPanel) {
      const int64_t n = std::min(kPanel, F - f0);
      T* g = gate + r0 * F + f0;
      T* u = up + r0 * F + f0;
      A *cg = c, *cu = c + m * kPanel;
      int64_t ldc = kPanel;
      if constexpr (std::is_same_v<T, A>) cg = g, cu = u, ldc = F;
      multiply<T>(m, n, f0, a.data, a.ld, w1, gate_panel, block.expert, cg, ldc, false);
      multiply<T>(m, n, f0, a.data, a.ld, w3, up_panel, block.expert, cu, ldc, false);
      ops.activate({.clamped = job.clamped, .rows = m, .columns = n, .g = cg, .u = cu, .ld_gu = ldc,
                    .pre = job.pre ? job.pre + r0 : nullptr, .post = job.post ? job.post + r0 : nullptr,
                    .b1 = job.b1 + block.expert * F + f0, .b3 = job.b3 + block.expert * F + f0, .h = h_block + f0, .ld_h = job.Fp});
      if constexpr (!std::is_same_v<T, A>) {
        ops.put_rows(cg, ldc, m, n, nullptr, nullptr, g, F);
        ops.put_rows(cu, ldc, m, n, nullptr, nullptr, u, F);
      }
    }
    if (job.Fp > F) {
      for (int64_t r = 0; r < m; ++r) h_block[r * job.Fp + F] = T{};
    }
  };
  for (const Group& group : job.groups) {
    run_tasks(group.num_blocks(), [&](int64_t task, int64_t worker) {
      up_and_gate(job.blocks[group.block_begin + task], group, scratch.arena(worker));
      gemm_done();
    });
    run_tasks(down.num_tasks(), [&](int64_t task, int64_t worker) {
      down.run(task, group, scratch.arena(worker));
      gemm_done();
    });
  }
  return out;
}

/// dw2 = dy' h and (dw1, dw3) = (dg', du') x, tile by tile.
template <class T>
class WeightGradients {
  using A = Accumulate<T>;

 public:
  struct Result {
    T *w1, *w3, *w2;  // as the weights
    T* b2;            // [e, D] or null
  };
  /// dg, du, h: rows of the current group.
  WeightGradients(const Job<T>& job, RowView<T> x, RowView<T> dy, const T* dg, const T* du, const T* h, Result result)
      : job_(job), x_(x), dy_(dy), dg_(dg), du_(du), h_(h), result_(result) {
    tile_ = std::clamp(kTileElements / std::max<int64_t>(1, job.most_rows()) / 16 * 16, int64_t{16}, kTile);
    up_tiles_ = divide_up(job.F, tile_), down_tiles_ = divide_up(job.D, 2 * tile_);
    stream_ = 3 * job.num_experts * job.F * job.D * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
  }

  int64_t num_tasks(const Group& group) const { return (group.expert_end - group.expert_begin) * (up_tiles_ + down_tiles_); }
  int64_t scratch_bytes() const {
    const int64_t most = job_.most_rows();
    return space<T>(2 * tile_ * stride(most)) + space<T>(std::min(padded<T>(most), kDepth<T>) * kPanel) + space<A>(2 * tile_ * kPanel) +
           space<A>(2 * tile_);
  }

  void run(int64_t task, const Group& group, Arena arena) const {
    const int64_t D = job_.D, F = job_.F, e = group.expert_begin + task / (up_tiles_ + down_tiles_), tile = task % (up_tiles_ + down_tiles_);
    const int64_t r0 = job_.first[e], n = job_.rows_of(e), at = (r0 - group.begin) * job_.Fp, ld = stride(n);
    T* a = arena.take<T>(2 * tile_ * ld);
    const auto& ops = simd_ops<T>();
    if (tile < up_tiles_) {
      const int64_t row = tile * tile_, rows = std::min(tile_, F - row);
      ops.transpose({dg_ + at + row, job_.Fp, nullptr}, n, rows, a, ld, padded<T>(n));
      ops.transpose({du_ + at + row, job_.Fp, nullptr}, n, rows, a + rows * ld, ld, padded<T>(n));
      products<2>(n, {a, a + rows * ld}, rows, x_.from(r0, 0), D, {result_.w1 + (e * F + row) * D, result_.w3 + (e * F + row) * D}, arena);
      return;
    }
    const int64_t row = (tile - up_tiles_) * 2 * tile_, rows = std::min(2 * tile_, D - row);
    ops.transpose(dy_.from(r0, row), n, rows, a, ld, padded<T>(n));
    products<1>(n, {a}, rows, {h_ + at, job_.Fp, nullptr}, F, {result_.w2 + (e * D + row) * F}, arena);
    if (result_.b2) {
      A* sums = arena.take<A>(2 * tile_);
      std::fill_n(sums, rows, A(0));
      ops.sum_rows(dy_.from(r0, row), n, rows, job_.post ? job_.post + r0 : nullptr, sums);
      ops.put_rows(sums, 0, 1, rows, nullptr, nullptr, result_.b2 + e * D + row, 0);
    }
  }

 private:
  // Of a transposed operand: whole lines, and not a power of two, which would put all its rows into a few sets of the cache.
  static int64_t stride(int64_t n) {
    constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
    return (divide_up(n, line) | 1) * line;
  }

  // out[i] [m, columns] = a[i] [m, n] b [n, columns]; zeros if n is 0.
  template <int kCount>
  void products(int64_t n, std::array<const T*, kCount> a, int64_t m, RowView<T> b, int64_t columns, std::array<T*, kCount> out,
                Arena& arena) const {
    if (n == 0) {
      for (T* o : out) std::fill_n(o, m * columns, T{});
      return;
    }
    const bool pairs = wants_pairs<T>(), pack = pairs || b.index;
    T* packed = arena.take<T>(std::min(padded<T>(job_.most_rows()), kDepth<T>) * kPanel);
    A* c = arena.take<A>(2 * tile_ * kPanel);
    const auto& ops = simd_ops<T>();
    for (int64_t c0 = 0; c0 < columns; c0 += kPanel) {
      const int64_t width = std::min(kPanel, columns - c0);
      for (int64_t k0 = 0; k0 < n; k0 += kDepth<T>) {
        const int64_t k = std::min(kDepth<T>, n - k0);
        const RowView<T> from = b.from(k0, c0);
        if (pack) ops.pack(from, nullptr, k, width, pairs, packed, kPanel);
        for (int i = 0; i < kCount; ++i) {
          A* to = c + i * m * kPanel;
          int64_t ld = kPanel;
          if constexpr (std::is_same_v<T, A>) {
            if (!stream_) to = out[i] + c0, ld = columns;
          }
          multiply_pieces<T>(m, width, padded<T>(k), a[i] + k0, stride(n), pack ? packed : from.data, pack ? kPanel : b.stride, to, ld, k0 > 0);
        }
      }
      if (std::is_same_v<T, A> && !stream_) continue;
      for (int i = 0; i < kCount; ++i) {
        if (stream_) ops.stream_rows(c + i * m * kPanel, kPanel, m, width, out[i] + c0, columns);
        else ops.put_rows(c + i * m * kPanel, kPanel, m, width, nullptr, nullptr, out[i] + c0, columns);
      }
    }
  }

  const Job<T>& job_;
  RowView<T> x_, dy_;
  const T *dg_, *du_, *h_;
  Result result_;
  int64_t tile_, up_tiles_, down_tiles_;
  bool stream_;
};

template <class T>
ExpertsGradients backward(const ExpertsConfig& config, const ExpertsWeights& weights, const ExpertsSaved& saved, const at::Tensor& dy) {
  using A = Accumulate<T>;
  const Job<T> job(config, weights, saved.input);
  const auto& ops = simd_ops<T>();
  const int64_t F = job.F, D = job.D;
  const auto like = [](const at::Tensor& t) { return t.defined() ? large_empty_like(t) : t; };
  ExpertsGradients out;
  out.x = large_empty_like(saved.input.x);
  out.weights = {like(weights.w1_eFD), like(weights.w3_eFD), like(weights.w2_eDF), like(weights.b1_eF), like(weights.b3_eF), like(weights.b2_eD)};
  if (config.scores != ScoreSide::none) out.scores_R = at::zeros_like(saved.input.scores_R);
  const int64_t group_size = job.most_group_rows() * job.Fp;
  const at::Tensor between = large_empty({3, group_size}, dy.options());
  T* dg = data<T>(between);
  T* du = dg + group_size;
  T* h = du + group_size;

  const RowView<T> x = job.rows(saved.input.x), dy_rows = job.rows(dy);
  const Right<T> w2{job.w2, D, F, false};
  const int64_t most = job.most_block_rows();
  const bool biases = weights.b1_eF.defined() || weights.b3_eF.defined();
  const at::Tensor bias_parts = biases ? at::zeros({job.num_blocks(), 2, F}, job.b1_holder.options()) : at::Tensor();
  A* d_scores = data<A>(out.scores_R);

  const int64_t bytes = space<T>(most * padded<T>(D)) + space<T>(Panel<T>::size(D)) + space<A>(most * kPanel);
  const WeightGradients<T> gradients(job, x, dy_rows, dg, du, h,
                                     {data<T>(out.weights.w1_eFD), data<T>(out.weights.w3_eFD), data<T>(out.weights.w2_eDF), data<T>(out.weights.b2_eD)});
  const Combine<T, 2> to_x(job, {{{dg, job.Fp, Right<T>{job.w1, F, D, false}}, {du, job.Fp, Right<T>{job.w3, F, D, false}}}}, nullptr, nullptr,
                           data<T>(out.x));
  int64_t num_tasks = job.num_blocks();
  for (const Group& group : job.groups) num_tasks = std::max(num_tasks, gradients.num_tasks(group) + to_x.num_tasks());
  const Scratch scratch(num_tasks, std::max({bytes, gradients.scratch_bytes(), to_x.scratch_bytes()}));

  const auto through_activation = [&](int64_t block_index, const Group& group, Arena arena) {
    const Block& block = job.blocks[block_index];
    const int64_t m = block.rows(), r0 = block.begin, e = block.expert, at0 = (r0 - group.begin) * job.Fp;
    const auto a = left_operand(dy_rows.from(r0, 0), m, D, arena.take<T>(most * padded<T>(D)));
    Panel<T> panel(w2, Walk::columns, arena);
    A* c = arena.take<A>(most * kPanel);
    A* parts = biases ? data<A>(bias_parts) + block_index * 2 * F : nullptr;
    for (int64_t f0 = 0; f0 < F; f0 += kPanel) {
      const int64_t n = std::min(kPanel, F - f0), at = at0 + f0;
      multiply<T>(m, n, f0, a.data, a.ld, w2, panel, e, c, kPanel, false);
      ops.activate_backward({.clamped = job.clamped, .rows = m, .columns = n,
                             .g = data<T>(saved.gate_RF) + r0 * F + f0, .u = data<T>(saved.up_RF) + r0 * F + f0, .ld_gu = F,
                             .pre = job.pre ? job.pre + r0 : nullptr, .post = job.post ? job.post + r0 : nullptr,
                             .b1 = job.b1 + e * F + f0, .b3 = job.b3 + e * F + f0, .dh = c, .ld_dh = kPanel,
                             .dg = dg + at, .du = du + at, .h = h + at, .ld_out = job.Fp,
                             .d_pre = job.pre ? d_scores + r0 : nullptr, .d_post = job.post ? d_scores + r0 : nullptr,
                             .db1 = parts ? parts + f0 : nullptr, .db3 = parts ? parts + F + f0 : nullptr});
    }
    if (job.b2 && job.post) ops.dot_rows({a.data, a.ld, nullptr}, m, D, job.b2 + e * D, d_scores + r0);
    if (job.Fp > F) {
      for (int64_t r = 0; r < m; ++r) {
        for (T* part : {dg, du, h}) part[at0 + r * job.Fp + F] = T{};
      }
    }
  };
  for (const Group& group : job.groups) {
    run_tasks(group.num_blocks(), [&](int64_t task, int64_t worker) {
      through_activation(group.block_begin + task, group, scratch.arena(worker));
      gemm_done();
    });
    run_tasks(to_x.num_tasks() + gradients.num_tasks(group), [&](int64_t task, int64_t worker) {
      if (task < to_x.num_tasks()) to_x.run(task, group, scratch.arena(worker));  // the larger tasks first
      else gradients.run(task - to_x.num_tasks(), group, scratch.arena(worker));
      gemm_done();
    });
  }

  if (biases) {  // a few numbers: summed here, in the order of the blocks
    const at::Tensor sums = at::zeros({2, job.num_experts, F}, job.b1_holder.options());
    A* sum = data<A>(sums);
    const A* part = data<A>(bias_parts);
    for (int64_t i = 0; i < job.num_blocks(); ++i) {
      for (int64_t side = 0; side < 2; ++side) {
        A* to = sum + (side * job.num_experts + job.blocks[i].expert) * F;
        for (int64_t f = 0; f < F; ++f) to[f] += part[(2 * i + side) * F + f];
      }
    }
    if (weights.b1_eF.defined()) out.weights.b1_eF.copy_(sums[0]);
    if (weights.b3_eF.defined()) out.weights.b3_eF.copy_(sums[1]);
  }
  return out;
}

template <class F>
auto for_dtype(at::ScalarType dtype, const F& f) {
  switch (dtype) {
    case at::kDouble: return f(double{});
    case at::kFloat: return f(float{});
    default: return f(Bf16{});
  }
}

}  // namespace

ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights, const ExpertsInput& input) {
  return for_dtype(input.x.scalar_type(), [&](auto t) { return forward<decltype(t)>(config, weights, input); });
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights, const ExpertsSaved& saved,
                                  const at::Tensor& dy) {
  return for_dtype(dy.scalar_type(), [&](auto t) { return backward<decltype(t)>(config, weights, saved, dy); });
}

}  // namespace moesh::kernels::cpu
