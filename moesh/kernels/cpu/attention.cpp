// Attention on the CPU. A task is one key head of one sequence, with all query heads that use it:
// its keys and values are packed once, as the right operands of the library's microkernels, and no
// two tasks add to the same gradient. Queries go through in blocks of 64. The scores of a block,
// [64, keys that it sees], stay in the cache of one core:
//   forward   s = q k';  p = softmax(s);  y = p v
//   backward  s = q k';  dp = dy v';  p, ds;  dv += p' dy;  dk += ds' q;  dq = ds k
// Keys are in panels of 64 too, and a block begins and ends with whole panels; what a query does
// not see has p = 0. B batch, L queries, S keys, h query heads, g key heads, d width of queries and
// keys, v width of values

#include "moesh/kernels/attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cmath>

#include "moesh/kernels/cpu/operands.h"
#include "moesh/kernels/cpu/tasks.h"

namespace moesh::kernels::cpu {
namespace {

constexpr int64_t kQueries = 64;  // of a block

int64_t whole_panels(int64_t n) { return divide_up(n, kPanel) * kPanel; }

// The rows of one head of one sequence.
template <class T>
struct HeadView {
  T* data;
  int64_t batch_stride, row_stride, head_stride;

  explicit HeadView(const at::Tensor& x)
      : data(static_cast<T*>(x.data_ptr())),
        batch_stride(x.stride(0)),
        row_stride(x.stride(1)),
        head_stride(x.stride(2)) {}
  T* row(int64_t batch, int64_t head, int64_t i) const {
    return data + batch * batch_stride + head * head_stride + i * row_stride;
  }
  RowView<T> rows(int64_t batch, int64_t head, int64_t i = 0) const {
    return {row(batch, head, i), row_stride, nullptr};
  }
};

at::Tensor side_by_side(const at::Tensor& x) {
  return x.size(3) > 1 && x.stride(3) != 1 ? x.contiguous() : x;
}

struct Sizes {
  int64_t batch, queries, keys, heads, key_heads, d, v;

  explicit Sizes(const AttentionInput& in)
      : batch(in.q_BLhd.size(0)),
        queries(in.q_BLhd.size(1)),
        keys(in.k_BSgd.size(1)),
        heads(in.q_BLhd.size(2)),
        key_heads(in.k_BSgd.size(2)),
        d(in.q_BLhd.size(3)),
        v(in.v_BSgv.size(3)) {}
  int64_t num_tasks() const { return queries > 0 ? batch * key_heads : 0; }
  int64_t padded_keys() const { return whole_panels(keys); }
  // Not a power of two: all rows would fall into a few sets of the cache.
  int64_t score_stride() const { return padded_keys() + 16; }
};

// Queries [first, first + rows), and the panels of keys [begin, end) that one of them sees.
struct QueryBlock {
  int64_t first, rows, begin, end;
  std::array<int64_t, kQueries> row_begin, row_end;  // what each query sees, from `begin` on

  // `starts` of the documents of this sequence's queries; null: one document from key 0 on.
  QueryBlock(const AttentionConfig& c, const Sizes& n, int64_t first_query, const int64_t* starts)
      : first(first_query), rows(std::min(kQueries, n.queries - first_query)) {
    const auto sees_from = [&](int64_t query) {
      const int64_t position = c.start + query, document = starts ? starts[query] : 0;
      int64_t from = std::max<int64_t>(0, document);
      if (c.window > 0) from = std::max(from, position - c.window + 1);
      if (c.chunk > 0) from = std::max(from, position - (position - document) % c.chunk);
      return from;
    };
    begin = sees_from(first) / kPanel * kPanel;  // later queries see none before it
    end = whole_panels(c.start + first + rows);
    for (int64_t r = 0; r < rows; ++r) {
      row_begin[static_cast<size_t>(r)] = sees_from(first + r) - begin;
      row_end[static_cast<size_t>(r)] = c.start + first + r + 1 - begin;
    }
  }
  int64_t columns() const { return end - begin; }
};

const int64_t* starts_of(const AttentionInput& in, int64_t batch) {
  return in.starts_BL.defined()
             ? in.starts_BL.const_data_ptr<int64_t>() + batch * in.starts_BL.size(1)
             : nullptr;
}

// [S, w] as a right operand whose columns are the keys: a panel for every 64 of them.
template <class T>
class KeysAsColumns {
 public:
  static int64_t size(int64_t keys, int64_t width) { return whole_panels(keys) * padded<T>(width); }
  KeysAsColumns(RowView<T> x, int64_t keys, int64_t width, Arena& arena)
      : width_(width), memory_(arena.take<T>(size(keys, width))) {
    for (int64_t j = 0; j < keys; j += kPanel)
      simd_ops<T>().pack_transposed(x.row(j), nullptr, x.stride, std::min(kPanel, keys - j), width,
                                    wants_pairs<T>(), memory_ + j * padded<T>(width));
  }
  /// s [rows, columns] = a [rows, w] times the keys of the block.
  void multiply(const QueryBlock& block, int64_t keys, const T* a, int64_t lda, Accumulate<T>* s,
                int64_t ld) const {
    for (int64_t j = block.begin; j < block.end; j += kPanel)
      gemm<T>(block.rows, std::min(kPanel, keys - j), padded<T>(width_), a, lda,
              memory_ + j * padded<T>(width_), kPanel, s + (j - block.begin), ld, false);
  }

 private:
  int64_t width_;
  T* memory_;
};

// [n, w] as a right operand whose inner rows are the n: a panel for every 64 of the w columns,
// zeros up to `depth`.
template <class T>
class RowsAsDepth {
 public:
  static int64_t size(int64_t depth, int64_t width) { return depth * whole_panels(width); }
  RowsAsDepth(int64_t depth, int64_t width, Arena& arena)
      : depth_(depth), width_(width), memory_(arena.take<T>(size(depth, width))) {}
  void pack(RowView<T> x, int64_t n) const {
    for (int64_t c = 0; c < width_; c += kPanel)
      simd_ops<T>().pack(x.from(0, c), nullptr, n, depth_, std::min(kPanel, width_ - c),
                         wants_pairs<T>(), memory_ + c * depth_);
  }
  int64_t panel(int64_t column) const { return std::min(kPanel, width_ - column); }
  /// c [m, panel(column)] (+)= a [m, k] times inner rows [from, from + k), columns from `column`
  /// on.
  void multiply(int64_t m, int64_t from, int64_t k, const T* a, int64_t lda, int64_t column,
                Accumulate<T>* c, int64_t ldc, bool add) const {
    multiply_long<T>(m, panel(column), k, a, lda, memory_ + column * depth_ + from * kPanel, kPanel,
                     c, ldc, add);
  }

 private:
  int64_t depth_, width_;
  T* memory_;
};

// c, rounded, into the rows of a result.
template <class T>
void put_block(const Accumulate<T>* c, int64_t ld, int64_t rows, int64_t columns, T* to,
               int64_t stride) {
  simd_ops<T>().put_rows(c, ld, rows, columns, nullptr, nullptr, to, stride);
}

template <class T>
AttentionOutput forward(const AttentionConfig& config, const AttentionInput& in) {
  using A = Accumulate<T>;
  const Sizes n(in);
  const auto wide = sizeof(A) == 8 ? at::kDouble : at::kFloat;
  const at::Tensor y = at::empty({n.batch, n.queries, n.heads, n.v}, in.q_BLhd.options());
  const at::Tensor lse = at::empty({n.batch, n.heads, n.queries}, in.q_BLhd.options().dtype(wide));
  const at::Tensor q_holder = side_by_side(in.q_BLhd), k_holder = side_by_side(in.k_BSgd),
                   v_holder = side_by_side(in.v_BSgv);
  const HeadView<T> q(q_holder), k(k_holder), v(v_holder), out(y);
  const A* sinks = in.sinks_h.defined() ? static_cast<const A*>(in.sinks_h.data_ptr()) : nullptr;
  A* lse_data = static_cast<A*>(lse.data_ptr());
  const int64_t ld = n.score_stride(), per_key = n.key_heads ? n.heads / n.key_heads : 0,
                workers = num_workers(n.num_tasks());
  const Scratch scratch(workers, space<T>(KeysAsColumns<T>::size(n.keys, n.d)) +
                                     space<T>(RowsAsDepth<T>::size(n.padded_keys(), n.v)) +
                                     space<A>(kQueries * ld) + space<T>(kQueries * ld) +
                                     space<A>(kQueries * kPanel) +
                                     space<T>(kQueries * padded<T>(n.d)));
  run_tasks(n.num_tasks(), workers, [&](int64_t task, int64_t worker) {
    const int64_t b = task / n.key_heads, g = task % n.key_heads;
    Arena arena = scratch.arena(worker);
    const KeysAsColumns<T> keys(k.rows(b, g), n.keys, n.d, arena);
    const RowsAsDepth<T> values(n.padded_keys(), n.v, arena);
    values.pack(v.rows(b, g), n.keys);
    A* s = arena.take<A>(kQueries * ld);
    T* p = arena.take<T>(kQueries * ld);
    A* c = arena.take<A>(kQueries * kPanel);
    T* left = arena.take<T>(kQueries * padded<T>(n.d));
    for (int64_t h = g * per_key; h < (g + 1) * per_key; ++h) {
      for (int64_t i = 0; i < n.queries; i += kQueries) {
        const QueryBlock block(config, n, i, starts_of(in, b));
        const auto a = left_operand<T>(q.rows(b, h, i), block.rows, n.d, left);
        keys.multiply(block, n.keys, a.data, a.ld, s, ld);
        simd_ops<T>().softmax({.rows = block.rows,
                               .columns = block.columns(),
                               .ld = ld,
                               .scale = static_cast<A>(config.scale),
                               .begin = block.row_begin.data(),
                               .end = block.row_end.data(),
                               .has_sink = sinks != nullptr,
                               .sink = sinks ? sinks[h] : A(0),
                               .s = s,
                               .p = p,
                               .lse = lse_data + (b * n.heads + h) * n.queries + i});
        for (int64_t column = 0; column < n.v; column += kPanel) {
          values.multiply(block.rows, block.begin, block.columns(), p, ld, column, c, kPanel,
                          false);
          put_block(c, kPanel, block.rows, values.panel(column), out.row(b, h, i) + column,
                    out.row_stride);
        }
      }
    }
    gemm_done();
  });
  return {y, lse};
}

template <class T>
AttentionGradients backward(const AttentionConfig& config, const AttentionInput& in,
                            const at::Tensor& lse, const at::Tensor& dy) {
  using A = Accumulate<T>;
  const Sizes n(in);
  const auto options = in.q_BLhd.options();
  const bool has_sinks = in.sinks_h.defined();
  AttentionGradients out{.q_BLhd = at::empty({n.batch, n.queries, n.heads, n.d}, options),
                         .k_BSgd = at::empty({n.batch, n.keys, n.key_heads, n.d}, options),
                         .v_BSgv = at::empty({n.batch, n.keys, n.key_heads, n.v}, options),
                         .sinks_h = {}};
  if (n.num_tasks() == 0) out.k_BSgd.zero_(), out.v_BSgv.zero_();
  // The sinks' parts by sequence, added in order at the end.
  const at::Tensor sink_parts =
      has_sinks ? at::zeros({n.batch, n.heads}, in.sinks_h.options()) : at::Tensor();
  const at::Tensor q_holder = side_by_side(in.q_BLhd), k_holder = side_by_side(in.k_BSgd),
                   v_holder = side_by_side(in.v_BSgv), dy_holder = side_by_side(dy);
  const HeadView<T> q(q_holder), k(k_holder), v(v_holder), g_y(dy_holder);
  const HeadView<T> dq(out.q_BLhd), dk(out.k_BSgd), dv(out.v_BSgv);
  const A* sinks = has_sinks ? static_cast<const A*>(in.sinks_h.data_ptr()) : nullptr;
  A* d_sinks = has_sinks ? static_cast<A*>(sink_parts.data_ptr()) : nullptr;
  const A* lse_data = static_cast<const A*>(lse.data_ptr());
  const int64_t ld = n.score_stride(), per_key = n.key_heads ? n.heads / n.key_heads : 0,
                workers = num_workers(n.num_tasks());
  const int64_t all = n.padded_keys();
  const Scratch scratch(
      workers, space<T>(KeysAsColumns<T>::size(n.keys, n.d)) +
                   space<T>(KeysAsColumns<T>::size(n.keys, n.v)) +
                   space<T>(RowsAsDepth<T>::size(all, n.d)) +
                   space<T>(RowsAsDepth<T>::size(kQueries, n.d)) +
                   space<T>(RowsAsDepth<T>::size(kQueries, n.v)) + space<A>(all * n.d) +
                   space<A>(all * n.v) + 2 * space<A>(kQueries * ld) + 2 * space<T>(kQueries * ld) +
                   space<T>(all * kQueries) + space<A>(kQueries * kPanel) + space<A>(kQueries) +
                   space<T>(kQueries * padded<T>(n.d)) + space<T>(kQueries * padded<T>(n.v)));
  run_tasks(n.num_tasks(), workers, [&](int64_t task, int64_t worker) {
    const int64_t b = task / n.key_heads, g = task % n.key_heads;
    const auto& ops = simd_ops<T>();
    Arena arena = scratch.arena(worker);
    const KeysAsColumns<T> keys(k.rows(b, g), n.keys, n.d, arena),
        values(v.rows(b, g), n.keys, n.v, arena);
    const RowsAsDepth<T> key_rows(all, n.d, arena), queries(kQueries, n.d, arena),
        outputs(kQueries, n.v, arena);
    key_rows.pack(k.rows(b, g), n.keys);
    A* sum_k = arena.take<A>(all * n.d);
    A* sum_v = arena.take<A>(all * n.v);
    std::fill_n(sum_k, all * n.d, A(0));
    std::fill_n(sum_v, all * n.v, A(0));
    A *s = arena.take<A>(kQueries * ld), *dp = arena.take<A>(kQueries * ld);
    T *p = arena.take<T>(kQueries * ld), *ds = arena.take<T>(kQueries * ld);
    T* turned = arena.take<T>(all * kQueries);
    A *c = arena.take<A>(kQueries * kPanel), *delta = arena.take<A>(kQueries);
    T *left_q = arena.take<T>(kQueries * padded<T>(n.d)),
      *left_y = arena.take<T>(kQueries * padded<T>(n.v));
    for (int64_t h = g * per_key; h < (g + 1) * per_key; ++h) {
      for (int64_t i = 0; i < n.queries; i += kQueries) {
        const QueryBlock block(config, n, i, starts_of(in, b));
        const int64_t columns = block.columns();
        const A* lse_block = lse_data + (b * n.heads + h) * n.queries + i;
        const auto a = left_operand<T>(q.rows(b, h, i), block.rows, n.d, left_q);
        keys.multiply(block, n.keys, a.data, a.ld, s, ld);
        const auto y = left_operand<T>(g_y.rows(b, h, i), block.rows, n.v, left_y);
        values.multiply(block, n.keys, y.data, y.ld, dp, ld);
        ops.softmax_backward({.rows = block.rows,
                              .columns = columns,
                              .ld = ld,
                              .scale = static_cast<A>(config.scale),
                              .begin = block.row_begin.data(),
                              .end = block.row_end.data(),
                              .s = s,
                              .dp = dp,
                              .lse = lse_block,
                              .p = p,
                              .ds = ds,
                              .delta = delta});
        if (has_sinks)
          for (int64_t r = 0; r < block.rows; ++r)
            d_sinks[b * n.heads + h] -= std::exp(sinks[h] - lse_block[r]) * delta[r];
        // dv += p' dy and dk += ds' q, over the queries of the block.
        const auto add_products = [&](const T* from, const RowsAsDepth<T>& right, RowView<T> rows,
                                      int64_t width, A* sums) {
          ops.transpose({from, ld, nullptr}, block.rows, columns, turned, kQueries, kQueries);
          right.pack(rows, block.rows);
          for (int64_t column = 0; column < width; column += kPanel)
            right.multiply(columns, 0, kQueries, turned, kQueries, column,
                           sums + block.begin * width + column, width, true);
        };
        add_products(p, outputs, g_y.rows(b, h, i), n.v, sum_v);
        add_products(ds, queries, q.rows(b, h, i), n.d, sum_k);
        for (int64_t column = 0; column < n.d; column += kPanel) {
          key_rows.multiply(block.rows, block.begin, columns, ds, ld, column, c, kPanel, false);
          put_block(c, kPanel, block.rows, key_rows.panel(column), dq.row(b, h, i) + column,
                    dq.row_stride);
        }
      }
    }
    put_block(sum_k, n.d, n.keys, n.d, dk.row(b, g, 0), dk.row_stride);
    put_block(sum_v, n.v, n.keys, n.v, dv.row(b, g, 0), dv.row_stride);
    gemm_done();
  });
  if (has_sinks) out.sinks_h = sink_parts.sum(0);
  return out;
}

}  // namespace

AttentionOutput attention_forward(const AttentionConfig& config, const AttentionInput& input) {
  return for_dtype(input.q_BLhd.scalar_type(),
                   [&](auto t) { return forward<decltype(t)>(config, input); });
}

AttentionGradients attention_backward(const AttentionConfig& config, const AttentionInput& input,
                                      const AttentionOutput& output, const at::Tensor& dy_BLhv) {
  return for_dtype(input.q_BLhd.scalar_type(), [&](auto t) {
    return backward<decltype(t)>(config, input, output.lse_BhL, dy_BLhv);
  });
}

}  // namespace moesh::kernels::cpu
