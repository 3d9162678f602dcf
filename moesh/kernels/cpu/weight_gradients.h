#pragma once
// Products over the rows of one expert: the gradients of its weights.

#include <array>

#include "moesh/kernels/cpu/job.h"

namespace moesh::kernels::cpu {

constexpr int64_t kTile = 256;  // rows of a tile of dw1 and dw3, half of those of dw2
constexpr int64_t kTileElements = 1 << 20;
constexpr int64_t kStreamBytes = 1 << 23;  // of one gradient

/// Whether the page at `p` has been touched before.
bool is_resident(const void* p);

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
  WeightGradients(const ExpertsJob<T>& job, RowView<T> x, RowView<T> dy, const T* dg, const T* du,
                  const T* h, Result result)
      : job_(job), x_(x), dy_(dy), dg_(dg), du_(du), h_(h), result_(result) {
    tile_ = std::clamp(kTileElements / std::max<int64_t>(1, job.most_rows()) / 16 * 16, int64_t{16},
                       kTile);
    up_tiles_ = divide_up(job.F, tile_), down_tiles_ = divide_up(job.D, 2 * tile_);
    // Large gradients leave the cache anyway: write past it. Not so on fresh pages, whose lines the
    // kernel zeroes in the cache.
    const int64_t bytes = job.num_experts * job.F * job.D * static_cast<int64_t>(sizeof(T));
    stream_ = bytes >= kStreamBytes &&
              is_resident(result.w1 + bytes / static_cast<int64_t>(sizeof(T)) / 2);
  }

  int64_t num_tasks(const ExpertGroup& group) const {
    return (group.expert_end - group.expert_begin) * (up_tiles_ + down_tiles_);
  }
  int64_t scratch_bytes() const {
    const int64_t most = job_.most_rows();
    return space<T>(2 * tile_ * stride(most)) +
           space<T>(std::min(rounded_depth<T>(most), kDepth<T>) * kPanel) +
           space<A>(2 * tile_ * kPanel) + space<A>(2 * tile_);
  }

  void run(int64_t task, const ExpertGroup& group, Arena arena) const {
    const int64_t D = job_.D, F = job_.F, e = group.expert_begin + task / (up_tiles_ + down_tiles_),
                  tile = task % (up_tiles_ + down_tiles_);
    const int64_t r0 = job_.first[e], n = job_.rows_of(e), at = (r0 - group.kept_from) * job_.Fp,
                  ld = stride(n);
    T* a = arena.take<T>(2 * tile_ * ld);
    const auto& ops = simd_ops<T>();
    if (tile < up_tiles_) {
      const int64_t row = tile * tile_, rows = std::min(tile_, F - row);
      ops.transpose({dg_ + at + row, job_.Fp, nullptr}, n, rows, a, ld, rounded_depth<T>(n));
      ops.transpose({du_ + at + row, job_.Fp, nullptr}, n, rows, a + rows * ld, ld,
                    rounded_depth<T>(n));
      products<2>(n, {a, a + rows * ld}, rows, x_.from(r0, 0), D,
                  {result_.w1 + (e * F + row) * D, result_.w3 + (e * F + row) * D}, arena);
      return;
    }
    const int64_t row = (tile - up_tiles_) * 2 * tile_, rows = std::min(2 * tile_, D - row);
    ops.transpose(dy_.from(r0, row), n, rows, a, ld, rounded_depth<T>(n));
    products<1>(n, {a}, rows, {h_ + at, job_.Fp, nullptr}, F, {result_.w2 + (e * D + row) * F},
                arena);
    if (result_.b2) {
      A* sums = arena.take<A>(2 * tile_);
      std::fill_n(sums, rows, A(0));
      ops.sum_rows(dy_.from(r0, row), n, rows, job_.post ? job_.post + r0 : nullptr, sums);
      ops.put_rows(sums, 0, 1, rows, nullptr, nullptr, result_.b2 + e * D + row, 0);
    }
  }

 private:
  // Stride of a transposed operand: whole lines, and not a power of two, which would put all its
  // rows into a few sets of the cache.
  static int64_t stride(int64_t n) {
    constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
    return (divide_up(rounded_depth<T>(n), line) | 1) * line;
  }

  // out[i] [m, columns] = a[i] [m, n] b [n, columns]; zeros if n is 0.
  template <int kCount>
  void products(int64_t n, std::array<const T*, kCount> a, int64_t m, RowView<T> b, int64_t columns,
                std::array<T*, kCount> out, Arena& arena) const {
    if (n == 0) {
      for (T* o : out) std::fill_n(o, m * columns, T{});
      return;
    }
    T* packed = arena.take<T>(std::min(rounded_depth<T>(n), kDepth<T>) * kPanel);
    A* c = arena.take<A>(2 * tile_ * kPanel);
    const auto& ops = simd_ops<T>();
    for (int64_t c0 = 0; c0 < columns; c0 += kPanel) {
      const int64_t width = std::min(kPanel, columns - c0);
      for (int64_t k0 = 0; k0 < n; k0 += kDepth<T>) {
        const int64_t k = std::min(kDepth<T>, n - k0), depth = rounded_depth<T>(k);
        ops.pack(b.from(k0, c0), nullptr, k, depth, width, wants_pairs<T>(), packed);
        for (int i = 0; i < kCount; ++i) {
          A* to = c + i * m * kPanel;
          int64_t ld = kPanel;
          if constexpr (std::is_same_v<T, A>) {
            if (!stream_) to = out[i] + c0, ld = columns;
          }
          multiply_long<T>(m, width, depth, a[i] + k0, stride(n), packed, kPanel, to, ld, k0 > 0);
        }
      }
      if (std::is_same_v<T, A> && !stream_) continue;
      for (int i = 0; i < kCount; ++i) {
        if (stream_)
          ops.stream_rows(c + i * m * kPanel, kPanel, m, width, out[i] + c0, columns);
        else
          ops.put_rows(c + i * m * kPanel, kPanel, m, width, nullptr, nullptr, out[i] + c0,
                       columns);
      }
    }
  }

  const ExpertsJob<T>& job_;
  RowView<T> x_, dy_;
  const T *dg_, *du_, *h_;
  Result result_;
  int64_t tile_, up_tiles_, down_tiles_;
  bool stream_;
};

}  // namespace moesh::kernels::cpu
