#include "conformance.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <thread>

#include "conformance_values.h"
#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "tests/comm/trace.h"

namespace moesh::comm::conformance {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::sum, ReduceOp::max, ReduceOp::min};

std::int64_t sum_of(const Rows& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

bool is_float(at::ScalarType t) {
  return t == at::kDouble || t == at::kFloat || t == at::kBFloat16;
}
bool is_defined(ReduceOp op, at::ScalarType t) { return op != ReduceOp::sum || t != at::kBool; }

void expect_sum(const at::Tensor& got, const at::Tensor& expected, const Setup& setup,
                const std::string& what) {
  if (setup.exact_sums || !is_float(got.scalar_type())) return expect_equal(got, expected, what);
  require(got.sizes() == expected.sizes() && got.scalar_type() == expected.scalar_type(), what,
          ": ", got.toString(), " ", got.sizes(), " instead of ", expected.toString(), " ",
          expected.sizes());
  const double tolerance = got.scalar_type() == at::kDouble  ? 1e-12
                           : got.scalar_type() == at::kFloat ? 1e-5
                                                             : 2e-2;
  // Terms of up to 143 cancel: what is left is compared on their scale.
  require(
      at::allclose(got.cpu().to(at::kDouble), expected.to(at::kDouble), tolerance, 500 * tolerance),
      what, ": got\n", got, "\nexpected\n", expected);
}

// ---------------------------------------------------------------- expected values

template <class V, class A>
at::Tensor plain_fold(ReduceOp op, const std::vector<at::Tensor>& xs) {
  at::Tensor out = at::empty_like(xs[0]);
  auto* to = out.data_ptr<V>();
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    A acc = static_cast<A>(xs[0].const_data_ptr<V>()[i]);
    for (size_t r = 1; r < xs.size(); ++r) {
      const A v = static_cast<A>(xs[r].const_data_ptr<V>()[i]);
      if (op == ReduceOp::sum) {
        acc = static_cast<A>(acc + v);
      } else if (op == ReduceOp::max) {
        acc = v > acc ? v : acc;
      } else {
        acc = v < acc ? v : acc;
      }
    }
    to[i] = static_cast<V>(acc);
  }
  return out;
}

// In rank order; bfloat16 in float32, rounded once.
at::Tensor plain_fold(ReduceOp op, const std::vector<at::Tensor>& xs) {
  switch (xs[0].scalar_type()) {
    case at::kDouble: return plain_fold<double, double>(op, xs);
    case at::kFloat: return plain_fold<float, float>(op, xs);
    case at::kBFloat16: return plain_fold<c10::BFloat16, float>(op, xs);
    case at::kLong: return plain_fold<std::int64_t, std::int64_t>(op, xs);
    case at::kInt: return plain_fold<std::int32_t, std::int32_t>(op, xs);
    default: return plain_fold<bool, bool>(op, xs);
  }
}

std::vector<at::Tensor> of_all_ranks(int size, const std::function<at::Tensor(int)>& make) {
  std::vector<at::Tensor> xs;
  for (int r = 0; r < size; ++r) xs.push_back(make(r));
  return xs;
}

at::Tensor rows_of(const at::Tensor& x, const Rows& rows, int rank) {
  return x.narrow(0, std::accumulate(rows.begin(), rows.begin() + rank, std::int64_t{0}),
                  rows[static_cast<size_t>(rank)]);
}

// A start, so that the input can be compared after the operation.
at::Tensor untouched(const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& f,
                     const std::string& what) {
  const at::Tensor before = x.cpu().clone();
  at::Tensor y = f(x);
  require(same_bits(x, before), what, ": the input was written");
  return y;
}

Shape with_rows(std::int64_t rows, const Shape& inner) {
  Shape shape{rows};
  shape.insert(shape.end(), inner.begin(), inner.end());
  return shape;
}

// Rows per rank: even, uneven with empty ones, all on one rank, none at all.
std::vector<Rows> row_patterns(int size) {
  const auto n = static_cast<size_t>(size);
  std::vector<Rows> all{Rows(n, 1), Rows(n, 3), Rows(n, 0), Rows(n, 0), Rows(n, 0), Rows(n, 0)};
  for (size_t r = 0; r < n; ++r) all[3][r] = static_cast<std::int64_t>((r * 5 + 3) % 4);  // 3 0 1 2
  for (size_t r = 0; r < n; ++r) all[4][r] = static_cast<std::int64_t>(r % 2 * 7);        // 0 7 0 7
  all[5][n - 1] = 5;
  return all;
}

const std::vector<Shape>& inner_shapes() {
  static const std::vector<Shape> shapes{{}, {3}, {2, 5}, {0}};
  return shapes;
}

// ---------------------------------------------------------------- one check for each collective

void check_all_reduce(Group& g, const Setup& s, at::ScalarType dtype, ReduceOp op,
                      const Shape& shape, int salt) {
  const auto what = detail::concat("all_reduce(", to_string(op), ", ", dtype, " ", shape, ")");
  const auto xs = of_all_ranks(g.size(), [&](int r) { return host(dtype, shape, r, salt); });
  const auto y = untouched(
      xs[static_cast<size_t>(g.rank())].to(s.device),
      [&](const auto& x) { return g.all_reduce(x, op); }, what);
  require(y.device() == s.device, what, ": the result is on ", y.device());
  expect_sum(y, plain_fold(op, xs), s, what);
}

void check_all_gather(Group& g, const Setup& s, at::ScalarType dtype, const Rows& rows,
                      const Shape& inner, int salt, bool pass_rows = true) {
  const auto what = detail::concat("all_gather(", dtype, " rows ", rows, ", inner ", inner, ")");
  const auto xs = of_all_ranks(g.size(), [&](int r) {
    return host(dtype, with_rows(rows[static_cast<size_t>(r)], inner), r, salt);
  });
  const auto y = untouched(
      xs[static_cast<size_t>(g.rank())].to(s.device),
      [&](const auto& x) { return g.all_gather(x, pass_rows ? rows : Rows{}); }, what);
  expect_equal(y, at::cat(xs), what);
}

void check_reduce_scatter(Group& g, const Setup& s, at::ScalarType dtype, ReduceOp op,
                          const Rows& rows, const Shape& inner, int salt, bool pass_rows = true) {
  const auto what = detail::concat("reduce_scatter(", to_string(op), ", ", dtype, " rows ", rows,
                                   ", inner ", inner, ")");
  const auto xs = of_all_ranks(
      g.size(), [&](int r) { return host(dtype, with_rows(sum_of(rows), inner), r, salt); });
  const auto y = untouched(
      xs[static_cast<size_t>(g.rank())].to(s.device),
      [&](const auto& x) { return g.reduce_scatter(x, pass_rows ? rows : Rows{}, op); }, what);
  expect_sum(y, rows_of(plain_fold(op, xs), rows, g.rank()), s, what);
}

// rows(i, j) go from rank i to rank j.
void check_all_to_all(Group& g, const Setup& s, at::ScalarType dtype,
                      const std::function<std::int64_t(int, int)>& rows, const Shape& inner,
                      int salt) {
  const int n = g.size(), me = g.rank();
  std::vector<Rows> send(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) send[static_cast<size_t>(i)].push_back(rows(i, j));
  Rows recv;
  for (int i = 0; i < n; ++i) recv.push_back(rows(i, me));
  const auto& mine = send[static_cast<size_t>(me)];
  const auto what =
      detail::concat("all_to_all(", dtype, " send ", mine, ", recv ", recv, ", inner ", inner, ")");

  std::vector<at::Tensor> parts;
  for (int i = 0; i < n; ++i) {
    const auto& of_i = send[static_cast<size_t>(i)];
    parts.push_back(rows_of(host(dtype, with_rows(sum_of(of_i), inner), i, salt), of_i, me));
  }
  const auto x = host(dtype, with_rows(sum_of(mine), inner), me, salt).to(s.device);
  const auto y = untouched(x, [&](const auto& t) { return g.all_to_all(t, mine, recv); }, what);
  expect_equal(y, at::cat(parts), what);
}

void check_broadcast(Group& g, const Setup& s, at::ScalarType dtype, const Shape& shape, int root,
                     int salt) {
  const auto what = detail::concat("broadcast(", dtype, " ", shape, " from ", root, ")");
  const auto y = untouched(
      host(dtype, shape, g.rank(), salt).to(s.device),
      [&](const auto& x) { return g.broadcast(x, root); }, what);
  expect_equal(y, host(dtype, shape, root, salt), what);
}

// ---------------------------------------------------------------- cases

// Elements of a dtype that fill `bytes`.
std::int64_t numel_of(at::ScalarType dtype, std::int64_t bytes) {
  return bytes / static_cast<std::int64_t>(c10::elementSize(dtype));
}

void all_reduce_of_every_dtype(Group& g, const Setup& s) {
  int salt = 0;
  for (auto dtype : kDtypes)
    for (auto op : kOps)
      for (const Shape& shape :
           {Shape{}, Shape{1}, Shape{5}, Shape{3, 4}, Shape{0}, Shape{0, 3}, Shape{2, 3, 5}})
        if (is_defined(op, dtype)) check_all_reduce(g, s, dtype, op, shape, ++salt);
}

// Tensors above some KiB are summed in parts: around the border, odd sizes, more ranks than whole
// parts.
void all_reduce_large(Group& g, const Setup& s) {
  int salt = 0;
  for (auto dtype : kDtypes)
    for (auto op : kOps)
      if (is_defined(op, dtype))
        check_all_reduce(g, s, dtype, op, {numel_of(dtype, 32 * 1024) + 13}, ++salt);
  for (std::int64_t numel : {4095, 4096, 4097, 8192, 8193, 25013, 100003})
    check_all_reduce(g, s, at::kFloat, ReduceOp::sum, {numel}, ++salt);
  check_all_reduce(g, s, at::kBFloat16, ReduceOp::sum, {17, 41, 59}, ++salt);
}

void all_gather_of_every_dtype(Group& g, const Setup& s) {
  int salt = 0;
  for (auto dtype : kDtypes)
    for (const auto& rows : row_patterns(g.size()))
      for (const auto& inner : inner_shapes()) check_all_gather(g, s, dtype, rows, inner, ++salt);
  check_all_gather(g, s, at::kFloat, Rows(static_cast<size_t>(g.size()), 4), {2}, ++salt,
                   /*pass_rows=*/false);
  Rows large;
  for (int r = 0; r < g.size(); ++r) large.push_back(r == 1 ? 0 : 20011 + 997 * r);
  check_all_gather(g, s, at::kBFloat16, large, {3}, ++salt);
}

void reduce_scatter_of_every_dtype(Group& g, const Setup& s) {
  int salt = 0;
  for (auto dtype : kDtypes)
    for (auto op : kOps)
      for (const auto& rows : row_patterns(g.size()))
        for (const auto& inner : inner_shapes())
          if (is_defined(op, dtype)) check_reduce_scatter(g, s, dtype, op, rows, inner, ++salt);
  check_reduce_scatter(g, s, at::kFloat, ReduceOp::sum, Rows(static_cast<size_t>(g.size()), 2), {3},
                       ++salt, /*pass_rows=*/false);
  Rows large;
  for (int r = 0; r < g.size(); ++r) large.push_back(r == 1 ? 0 : 5003 + 97 * r);
  for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    check_reduce_scatter(g, s, dtype, ReduceOp::sum, large, {2}, ++salt);
}

void all_to_all_of_every_dtype(Group& g, const Setup& s) {
  int salt = 0;
  const int last = g.size() - 1;
  const std::vector<std::function<std::int64_t(int, int)>> patterns{
      [](int, int) { return 2; },                            // even
      [](int i, int j) { return (i * 3 + j * 5 + 1) % 4; },  // uneven, some empty
      [](int, int) { return 0; },                            // nothing moves
      [last](int, int j) { return j == last ? 3 : 0; },      // all to the last rank
      [](int i, int j) { return i == 0 ? j + 1 : 0; },       // all from the first
      [](int i, int j) { return i == j ? 4 : 0; },           // each keeps its own
      [](int i, int j) { return (i + 2 * j) % 5 * 1000; },   // many
  };
  for (auto dtype : kDtypes)
    for (const auto& rows : patterns)
      for (const auto& inner : inner_shapes()) check_all_to_all(g, s, dtype, rows, inner, ++salt);
  // No lists: the rows divide by the ranks.
  const auto x = host(at::kFloat, {2 * g.size(), 3}, g.rank(), ++salt);
  std::vector<at::Tensor> parts;
  for (int i = 0; i < g.size(); ++i)
    parts.push_back(host(at::kFloat, {2 * g.size(), 3}, i, salt).narrow(0, 2 * g.rank(), 2));
  expect_equal(g.all_to_all(x.to(s.device), {}, {}), at::cat(parts), "all_to_all without lists");
}

void broadcast_of_every_dtype(Group& g, const Setup& s) {
  int salt = 0;
  for (auto dtype : kDtypes)
    for (int root = 0; root < g.size(); ++root)
      for (const Shape& shape : {Shape{}, Shape{7}, Shape{0, 2}, Shape{2, 3, 4}, Shape{12345}})
        check_broadcast(g, s, dtype, shape, root, ++salt);
}

// MPI sends 17 MiB in more than one piece.
void large_blocks(Group& g, const Setup& s) {
  const std::int64_t numel = (17 << 20) / 8 + 3;
  const auto of = [&](int r) { return at::arange(numel, at::kLong).add_(numel * r).to(s.device); };
  expect_equal(g.broadcast(of(g.rank()), g.size() - 1), of(g.size() - 1).cpu(),
               "broadcast of a large block");
  Rows send(static_cast<size_t>(g.size()), 0), recv = send;  // each sends all it has to the next
  send[static_cast<size_t>((g.rank() + 1) % g.size())] = numel;
  const int last = (g.rank() + g.size() - 1) % g.size();
  recv[static_cast<size_t>(last)] = numel;
  expect_equal(g.all_to_all(of(g.rank()), send, recv), of(last).cpu(),
               "all_to_all of a large block");
}

void barrier_between_operations(Group& g, const Setup& s) {
  g.barrier();
  for (int i = 0; i < 20; ++i) {
    check_all_reduce(g, s, at::kLong, ReduceOp::sum, {i}, i);
    g.barrier();
    g.barrier();
  }
}

// Transposed, strided, expanded and offset views.
void inputs_need_not_be_contiguous(Group& g, const Setup& s) {
  const int n = g.size();
  const auto base = [](int r) { return host(at::kFloat, {8, 6, 10}, r, 3); };
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> views{
      [](const at::Tensor& x) { return x.transpose(0, 2); },
      [](const at::Tensor& x) { return x.slice(0, 1, 8, 2).slice(2, 3, 10, 3); },
      [](const at::Tensor& x) { return x.select(1, 2); },
      [](const at::Tensor& x) { return x.slice(0, 0, 1).expand({4, 6, 10}); },
      [](const at::Tensor& x) { return x.narrow(0, 3, 4); },
  };
  for (const auto& view : views) {
    const auto xs = of_all_ranks(n, [&](int r) { return view(base(r)).contiguous(); });
    const at::Tensor mine = view(base(g.rank()).to(s.device));
    const Rows even(static_cast<size_t>(n), mine.size(0));
    expect_sum(g.all_reduce(mine), plain_fold(ReduceOp::sum, xs), s, "all_reduce of a view");
    expect_equal(g.all_gather(mine), at::cat(xs), "all_gather of a view");
    Rows rows(static_cast<size_t>(n), 0);
    rows[0] = mine.size(0) - 1;
    rows[static_cast<size_t>(n - 1)] += 1;
    expect_sum(g.reduce_scatter(mine, rows), rows_of(plain_fold(ReduceOp::sum, xs), rows, g.rank()),
               s, "reduce_scatter of a view");
    expect_equal(g.broadcast(mine, n - 1), xs[static_cast<size_t>(n - 1)], "broadcast of a view");
    Rows send(static_cast<size_t>(n), 0),
        recv(static_cast<size_t>(n), 0);  // each sends all it has to the next
    send[static_cast<size_t>((g.rank() + 1) % n)] = mine.size(0);
    recv[static_cast<size_t>((g.rank() + n - 1) % n)] = mine.size(0);
    expect_equal(g.all_to_all(mine, send, recv), xs[static_cast<size_t>((g.rank() + n - 1) % n)],
                 "all_to_all of a view");
  }
}

// Several operations of several kinds and sizes are in progress at once.
void handles_wait_later(Group& g, const Setup& s) {
  const int n = g.size();
  const auto me = static_cast<size_t>(g.rank());
  const auto small = of_all_ranks(n, [&](int r) { return host(at::kFloat, {7, 3}, r, 1); });
  const auto large = of_all_ranks(n, [&](int r) { return host(at::kFloat, {20011}, r, 2); });
  const auto wide = of_all_ranks(n, [&](int r) { return host(at::kBFloat16, {4 * n, 5}, r, 3); });
  for (int round = 0; round < 3; ++round) {
    std::vector<Handle> handles;
    handles.push_back(g.start_all_reduce(large[me].to(s.device)));
    handles.push_back(g.start_all_gather(small[me].to(s.device)));
    handles.push_back(g.start_all_reduce(small[me].to(s.device), ReduceOp::max));
    handles.push_back(g.start_reduce_scatter(wide[me].to(s.device)));
    handles.push_back(g.start_all_to_all(wide[me].to(s.device), {}, {}));
    handles.push_back(g.start_broadcast(large[me].to(s.device), n - 1));
    handles.push_back(g.start_all_reduce(large[me].to(s.device), ReduceOp::min));
    // A finished operation in between does not disturb those in progress.
    check_all_reduce(g, s, at::kDouble, ReduceOp::sum, {11}, round);

    std::vector<at::Tensor> ys;
    for (auto& h : handles) ys.push_back(h.wait());
    require(same_bits(handles[0].wait(), ys[0]), "a second wait gives another value");
    expect_sum(ys[0], plain_fold(ReduceOp::sum, large), s, "large all_reduce");
    expect_equal(ys[1], at::cat(small), "all_gather");
    expect_equal(ys[2], plain_fold(ReduceOp::max, small), "max");
    const Rows four(static_cast<size_t>(n), 4);
    expect_sum(ys[3], rows_of(plain_fold(ReduceOp::sum, wide), four, g.rank()), s,
               "reduce_scatter");
    std::vector<at::Tensor> parts;
    for (const auto& x : wide) parts.push_back(rows_of(x, four, g.rank()));
    expect_equal(ys[4], at::cat(parts), "all_to_all");
    expect_equal(ys[5], large[static_cast<size_t>(n - 1)], "broadcast");
    expect_equal(ys[6], plain_fold(ReduceOp::min, large), "large min");
  }
}

// Ranks may start the next operation before or after they wait for the last one (not under
// `checked`: there they agree on it).
void handles_wait_at_other_times(Group& g, const Setup& s) {
  const auto make = [](int r, int i) { return host(at::kFloat, {9001 + i}, r, i); };
  std::optional<Handle> last;
  for (int i = 0; i < 12; ++i) {
    Handle h = g.start_all_reduce(make(g.rank(), i).to(s.device));
    if (last) last->wait();
    const auto expected =
        plain_fold(ReduceOp::sum, of_all_ranks(g.size(), [&](int r) { return make(r, i); }));
    if ((s.checked ? i : g.rank()) % 2 == 0)
      expect_sum(h.wait(), expected, s, "all_reduce that was waited for at once");
    last.emplace(std::move(h));
  }
  const auto expected =
      plain_fold(ReduceOp::sum, of_all_ranks(g.size(), [&](int r) { return make(r, 11); }));
  expect_sum(last->wait(), expected, s, "all_reduce that was waited for later");
  {
    const Handle dropped = g.start_all_gather(host(at::kLong, {3}, g.rank(), 0).to(s.device));
  }
  check_all_reduce(g, s, at::kFloat, ReduceOp::sum, {5}, 1);
}

// An input belongs to the caller again when the operation has ended, also if a peer is slow to read
// it.
void inputs_may_be_written_afterwards(Group& g, const Setup& s) {
  const int n = g.size();
  if (n == 1) return;  // a group of one returns its input
  for (std::int64_t numel : {5, 3001, 40009, 300007}) {
    at::Tensor x = at::empty({numel}, at::TensorOptions(at::kLong).device(s.device));
    const auto slowly = [&](Handle h, int who) {
      if (g.rank() == who % n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      at::Tensor y = h.wait();
      x.fill_(-1);
      at::Tensor result = y.clone();
      y.fill_(-2);  // the result is the caller's as well
      return result;
    };
    for (int i = 0; i < 2 * n; ++i) {
      const int mine = i * 100 + g.rank();
      const at::Tensor gathered = slowly(g.start_all_gather(x.fill_(mine)), i);
      const at::Tensor first = slowly(g.start_broadcast(x.fill_(mine), 0), i);
      const at::Tensor sum = slowly(g.start_all_reduce(x.fill_(mine)), i);
      for (int r = 0; r < n; ++r)
        require(gathered.narrow(0, r * numel, numel).eq(i * 100 + r).all().item<bool>(),
                "all_gather read a later value");
      require(first.eq(i * 100).all().item<bool>(), "broadcast read a later value");
      require(sum.eq(i * 100 * n + n * (n - 1) / 2).all().item<bool>(),
              "all_reduce read a later value");
    }
  }
}

// Whatever the timing of the ranks: the same bits.
void reductions_do_not_depend_on_timing(Group& g, const Setup& s) {
  const Random random(17, static_cast<std::uint64_t>(g.rank()));
  std::uint64_t draw = 0;
  for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (std::int64_t numel : {257, 20011}) {
      at::Tensor first;
      const Rows rows = row_patterns(g.size())[3];
      const auto xs = of_all_ranks(g.size(), [&](int r) {
        return host(dtype, {numel * sum_of(rows)}, r, 5).reshape({-1, numel});
      });
      const auto expected = plain_fold(ReduceOp::sum, xs);
      for (int run = 0; run < 4; ++run) {
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(draw++, 800)));
        const auto x = xs[static_cast<size_t>(g.rank())].to(s.device);
        const auto y = g.all_reduce(x);
        expect_sum(y, expected, s, "all_reduce after a delay");
        if (run == 0) first = y;
        require(same_bits(y, first), "all_reduce of ", dtype, " [", numel,
                "] has other bits in run ", run);
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(draw++, 300)));
        expect_sum(g.reduce_scatter(x, rows), rows_of(expected, rows, g.rank()), s,
                   "reduce_scatter after a delay");
      }
      // Bits are the same on every rank, too.
      const auto of_root = g.broadcast(first, 0);
      require(same_bits(of_root, first), "all_reduce of ", dtype, " [", numel,
              "] has other bits on rank ", g.rank());
    }
}

void nan_and_infinity(Group& g, const Setup& s) {
  const double nan = std::numeric_limits<double>::quiet_NaN(),
               inf = std::numeric_limits<double>::infinity();
  for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (std::int64_t numel : {g.size() + 2, 20011})
      for (int bad = 0; bad < g.size(); ++bad) {
        at::Tensor x = at::full({numel}, static_cast<double>(g.rank()), at::kDouble);
        if (g.rank() == bad) {
          x[bad] = nan;
          x[g.size()] = inf;
          x[g.size() + 1] = -inf;
        }
        const auto sum = g.all_reduce(x.to(dtype).to(s.device)).cpu().to(at::kDouble);
        require(std::isnan(sum[bad].item<double>()) && sum[g.size()].item<double>() == inf,
                "sum of NaN or infinity: ", sum.slice(0, 0, 12));
        require(sum.isnan().sum().item<std::int64_t>() == 1, "a sum has a NaN too many");
        const auto max =
            g.all_reduce(x.to(dtype).to(s.device), ReduceOp::max).cpu().to(at::kDouble);
        const auto min =
            g.all_reduce(x.to(dtype).to(s.device), ReduceOp::min).cpu().to(at::kDouble);
        require(max[g.size()].item<double>() == inf && min[g.size() + 1].item<double>() == -inf,
                "max or min of infinity");
        if (!s.nan_wins) continue;
        require(std::isnan(max[bad].item<double>()) && std::isnan(min[bad].item<double>()),
                "max or min lost the NaN of rank ", bad);
        require(max.isnan().sum().item<std::int64_t>() == 1 &&
                    min.isnan().sum().item<std::int64_t>() == 1,
                "a NaN too many");
      }
}

// All ranks of `g` hold world ranks in the order `expected`; its collectives move what they should.
void check_group(Group& g, const Setup& s, const std::vector<int>& expected,
                 const std::string& name) {
  require(g.name() == name, "group '", g.name(), "' should be '", name, "'");
  require(g.members() == expected, "group '", name, "' has members ", g.members(), " instead of ",
          expected);
  const int world_rank = expected[static_cast<size_t>(g.rank())];
  const auto ranks = g.all_gather(at::full({1}, world_rank, at::kLong).to(s.device)).cpu();
  for (int r = 0; r < g.size(); ++r)
    require(ranks[r].item<std::int64_t>() == expected[static_cast<size_t>(r)],
            "all_gather of group '", name, "' gave ", ranks);
  check_all_reduce(g, s, at::kFloat, ReduceOp::sum, {11}, 1);
  check_all_reduce(g, s, at::kFloat, ReduceOp::sum, {9001}, 2);
  check_all_to_all(g, s, at::kInt, [](int i, int j) { return (i + 2 * j) % 3; }, {2}, 3);
  check_broadcast(g, s, at::kDouble, {3}, g.size() - 1, 4);
  g.barrier();
}

void splits(Group& g, const Setup& s) {
  const int n = g.size(), me = g.rank();
  const auto where = [&](auto pick) {
    std::vector<int> members;
    for (int r = 0; r < n; ++r)
      if (pick(r)) members.push_back(r);
    return members;
  };
  // By color.
  const auto parity = g.split(me % 2, 0, "parity");
  const auto of_parity = where([&](int r) { return r % 2 == me % 2; });
  check_group(*parity, s, of_parity, "parity");
  // One group whose keys turn the order around; equal keys keep the order of ranks.
  auto backwards = where([](int) { return true; });
  std::reverse(backwards.begin(), backwards.end());
  check_group(*g.split(3, -me, "backwards"), s, backwards, "backwards");
  check_group(*g.split(0, 7, "same"), s, where([](int) { return true; }), "same");
  // Rank 0 stays out.
  const auto rest = g.split(me == 0 ? -1 : 5, me, "rest");
  require((rest == nullptr) == (me == 0),
          "a rank of negative color is in a group, or another one is in none");
  if (rest) check_group(*rest, s, where([](int r) { return r > 0; }), "rest");
  // Every rank by itself.
  const auto alone = g.split(me, 0, "alone");
  check_group(*alone, s, {me}, "alone");
  // Groups of groups, while the outer ones stay in use; odd ranks have made more splits than even
  // ones by then.
  if (me % 2 == 1)
    for (int i = 0; i < 3; ++i) check_group(*parity->split(0, 0, "again"), s, of_parity, "again");
  const auto half = parity->split(parity->rank() % 2, -parity->rank(), "half");
  std::vector<int> of_half;
  for (size_t r = 0; r < of_parity.size(); ++r)
    if (r % 2 == static_cast<size_t>(parity->rank() % 2))
      of_half.insert(of_half.begin(), of_parity[r]);
  check_group(*half, s, of_half, "half");
  const auto pairs = g.split(me / 2, 0, "pairs");
  check_group(*pairs, s, where([&](int r) { return r / 2 == me / 2; }), "pairs");
  // Operations of several groups in progress at once.
  auto a = pairs->start_all_gather(at::full({2}, me, at::kLong).to(s.device));
  auto b = parity->start_all_reduce(host(at::kFloat, {9001}, parity->rank(), 6).to(s.device));
  auto c = g.start_all_gather(at::full({1}, me, at::kLong).to(s.device));
  require(c.wait().sum().item<std::int64_t>() == n * (n - 1) / 2, "all_gather of the world");
  expect_sum(
      b.wait(),
      plain_fold(ReduceOp::sum, of_all_ranks(parity->size(),
                                             [](int r) { return host(at::kFloat, {9001}, r, 6); })),
      s, "all_reduce of a group");
  const auto first = pairs->members()[0];
  require(a.wait()[0].item<std::int64_t>() == first, "all_gather of a pair");
  if (s.any_order) {  // two groups of the same ranks
    const auto x = at::full({1}, 1, at::kLong).to(s.device),
               y = at::full({1}, 10, at::kLong).to(s.device);
    const auto twin = g.split(0, 0, "twin"), other = g.split(0, 0, "other");
    std::optional<Handle> one, ten;
    if (me % 2 == 0) one.emplace(twin->start_all_reduce(x));
    ten.emplace(other->start_all_reduce(y));
    if (me % 2 == 1) one.emplace(twin->start_all_reduce(x));
    require(one->wait().item<std::int64_t>() == n && ten->wait().item<std::int64_t>() == 10 * n,
            "two groups were mixed up");
  }
  check_group(g, s, where([](int) { return true; }), g.name());
}

void trace_lists_what_was_started(Group& g, const Setup& s) {
  const auto x = host(at::kFloat, {2 * g.size(), 3}, g.rank(), 0).to(s.device);
  const auto bytes = static_cast<std::int64_t>(x.nbytes());
  Trace outer;
  {
    Trace inner;
    g.all_reduce(x);
    g.all_gather(x);
    g.reduce_scatter(x);
    g.all_to_all(x, {}, {});
    g.broadcast(x, 0);
    g.barrier();
    const Collective expected[] = {Collective::all_reduce,     Collective::all_gather,
                                   Collective::reduce_scatter, Collective::all_to_all,
                                   Collective::broadcast,      Collective::barrier};
    const auto& seen = inner.entries();
    require(seen.size() == (g.size() == 1 ? 0 : std::size(expected)), "the trace has ", seen.size(),
            " entries");
    for (size_t i = 0; i < seen.size(); ++i) {
      require(seen[i].op == expected[i] && seen[i].group == g.name(), "entry ", i, " is ",
              to_string(seen[i].op), " of '", seen[i].group, "'");
      require(seen[i].bytes == (seen[i].op == Collective::barrier ? 0 : bytes), "entry ", i,
              " has ", seen[i].bytes, " bytes");
    }
  }
  g.all_reduce(x);
  require(outer.entries().size() == (g.size() == 1 ? 0 : 7), "the outer trace has ",
          outer.entries().size(), " entries");
}

// Arguments that can be seen to be wrong are refused before anything is sent.
void bad_arguments_are_refused(Group& g, const Setup& s) {
  const auto n = static_cast<size_t>(g.size());
  const auto x = host(at::kFloat, {2 * g.size(), 3}, g.rank(), 0).to(s.device);
  const auto name = "on group '" + g.name() + "'";
  expect_error([&] { g.all_reduce(at::Tensor()); }, {"all_reduce", name, "undefined"});
  expect_error([&] { g.all_gather(x.to(at::kHalf)); },
               {"all_gather", name, "dtype float16 is not supported; use float64, float32"});
  expect_error([&] { g.all_reduce(x.gt(0)); },
               {"all_reduce", name, "a sum of bool is not defined; use max (any) or min (all)"});
  expect_error([&] { g.reduce_scatter(x.gt(0)); },
               {"reduce_scatter", name, "a sum of bool is not defined"});
  expect_error([&] { g.all_reduce(at::zeros({1, 1, 1, 1, 1, 1, 1, 1, 1})); },
               {"9 dimensions; at most 8"});
  expect_error([&] { g.all_gather(x.sum()); },
               {"all_gather", name, "a scalar has no rows; use x.reshape({1})"});
  expect_error([&] { g.reduce_scatter(x.sum()); },
               {"reduce_scatter", name, "a scalar has no rows; use all_reduce"});
  expect_error([&] { g.all_to_all(x.sum(), {}, {}); },
               {"all_to_all", name, "a scalar has no rows"});
  expect_error([&] { g.all_gather(x, Rows(n + 1, 1)); },
               {"all_gather", name, "lists", "ranks and the group has"});
  expect_error([&] { g.all_gather(x, Rows(n, 99)); }, {"all_gather", name, "holds", "says 99"});
  expect_error([&] { g.all_gather(x, Rows(n, -1)); }, {"all_gather", name, "has a negative entry"});
  expect_error([&] { g.reduce_scatter(x, Rows(n, 5)); },
               {"reduce_scatter", name, "does not add up to the", "rows of the tensor"});
  expect_error([&] { g.all_to_all(x, Rows(n, 5), Rows(n, 5)); },
               {"all_to_all", name, "send", "does not add up"});
  expect_error([&] { g.all_to_all(x, Rows(n, 2), Rows(n, 3)); },
               {"all_to_all", name, "keeps 2 rows and expects 3 from itself"});
  expect_error(
      [&] { g.broadcast(x, g.size()); },
      {"broadcast", name, detail::concat("from rank ", g.size()), "the group has ranks 0 to"});
  expect_error([&] { g.broadcast(x, -1); }, {"broadcast", name, "from rank -1"});
  if (n > 1)
    expect_error([&] { g.reduce_scatter(x.narrow(0, 1, x.size(0) - 1)); },
                 {"rows are not divisible by", "pass the rows of each rank"});
  check_all_reduce(g, s, at::kFloat, ReduceOp::sum, {5}, 1);
}

void equal_values_keep_their_promise(Group& g, const Setup& s) {
  g.expect_same(host(at::kFloat, {5, 3}, 0, 1).to(s.device), "weight");
  g.expect_same(host(at::kBool, {}, 0, 2).to(s.device), "flag");
  g.expect_same(at::zeros({0, 4}).to(s.device), "nothing");
  check_all_reduce(g, s, at::kFloat, ReduceOp::sum, {5}, 1);
}

// A second thread of each rank, and what it threw.
class Beside {
 public:
  explicit Beside(const std::function<void()>& f)
      : thread_([this, f] {
          try {
            f();
          } catch (...) {
            fault_ = std::current_exception();
          }
        }) {}
  ~Beside() {
    if (thread_.joinable()) thread_.join();
  }
  void end() {
    thread_.join();
    if (fault_) std::rethrow_exception(fault_);
  }

 private:
  std::exception_ptr fault_;
  std::thread thread_;
};

// Every other rank enters the group only when it has left the background: on one stream the ranks
// would wait for each other for ever.
void background_runs_in_any_order(Group& g, const Setup& s) {
  const auto beside = g.background("beside");
  require(beside->size() == g.size() && beside->rank() == g.rank(), "the ranks are others");
  const Setup on_host{.checked = s.checked};
  const auto theirs = [&] { check_all_reduce(*beside, on_host, at::kLong, ReduceOp::sum, {7}, 3); };
  for (int round = 0; round < 20; ++round) {
    const auto x = host(at::kLong, {5}, g.rank(), round).to(s.device);
    Beside other(theirs);
    const bool comes_last = (g.rank() + round) % 2 == 0;
    if (comes_last) other.end();
    g.all_reduce(x);
    if (!comes_last) other.end();
  }
}

// Both groups are busy at once, and none sees the other's messages.
void background_keeps_its_messages(Group& g, const Setup& s) {
  const auto beside = g.background("beside");
  const Setup on_host{.checked = s.checked};
  const auto alone = digest(g, s, 31), alone_beside = digest(*beside, on_host, 37);
  for (int round = 0; round < 3; ++round) {
    Beside other([&] {
      require(digest(*beside, on_host, 37) == alone_beside, "the background has other bits");
    });
    require(digest(g, s, 31) == alone, "beside the background, the group has other bits");
    other.end();
  }
}

void random_collectives(Group& g, const Setup& s) { digest(g, s, 23); }

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"all_reduce_of_every_dtype", all_reduce_of_every_dtype},
      {"all_reduce_large", all_reduce_large},
      {"all_gather_of_every_dtype", all_gather_of_every_dtype},
      {"reduce_scatter_of_every_dtype", reduce_scatter_of_every_dtype},
      {"all_to_all_of_every_dtype", all_to_all_of_every_dtype},
      {"broadcast_of_every_dtype", broadcast_of_every_dtype},
      {"large_blocks", large_blocks},
      {"barrier_between_operations", barrier_between_operations},
      {"inputs_need_not_be_contiguous", inputs_need_not_be_contiguous},
      {"handles_wait_later", handles_wait_later},
      {"handles_wait_at_other_times", handles_wait_at_other_times},
      {"inputs_may_be_written_afterwards", inputs_may_be_written_afterwards},
      {"reductions_do_not_depend_on_timing", reductions_do_not_depend_on_timing},
      {"nan_and_infinity", nan_and_infinity},
      {"splits", splits},
      {"trace_lists_what_was_started", trace_lists_what_was_started},
      {"bad_arguments_are_refused", bad_arguments_are_refused},
      {"equal_values_keep_their_promise", equal_values_keep_their_promise},
      {"random_collectives", random_collectives},
      {"background_runs_in_any_order", background_runs_in_any_order},
      {"background_keeps_its_messages", background_keeps_its_messages},
  };
  static const std::vector<Case> with_messages = [] {
    std::vector<Case> both = all;
    both.insert(both.end(), message_cases().begin(), message_cases().end());
    return both;
  }();
  return with_messages;
}

std::uint64_t digest(Group& g, const Setup& s, std::uint64_t seed) {
  const int n = g.size(), me = g.rank();
  const Random shared(seed, "shape");  // the same draws on every rank
  std::uint64_t draw = 0;
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto absorb = [&](const at::Tensor& x) {
    const at::Tensor h = x.cpu().contiguous();
    const auto* p = static_cast<const unsigned char*>(h.const_data_ptr());
    for (size_t i = 0; i < h.nbytes(); ++i) hash = (hash ^ p[i]) * 0x100000001b3;
  };
  const auto normal = [&](at::ScalarType dtype, const Shape& shape, int round) {
    const Random random(seed + 1 + static_cast<std::uint64_t>(round),
                        static_cast<std::uint64_t>(me));
    at::Tensor x = at::empty(shape, at::kDouble);
    auto* p = x.data_ptr<double>();
    for (std::int64_t i = 0; i < x.numel(); ++i)
      p[i] = 100 * random.normal(static_cast<std::uint64_t>(i));
    return (dtype == at::kBool ? x.gt(0) : x.to(dtype)).to(s.device);
  };
  for (int round = 0; round < 60; ++round) {
    const auto dtype = kDtypes[shared.below(draw++, std::size(kDtypes))];
    auto op = kOps[shared.below(draw++, std::size(kOps))];
    if (!is_defined(op, dtype)) op = ReduceOp::max;
    const auto inner =
        static_cast<std::int64_t>(shared.below(draw++, 4) == 0 ? 2000 : shared.below(draw++, 9));
    Rows rows(static_cast<size_t>(n));
    for (auto& r : rows) r = static_cast<std::int64_t>(shared.below(draw++, 6));
    const auto my_rows = rows[static_cast<size_t>(me)];
    const auto kind = shared.below(draw++, 5);
    if (kind == 0) {
      absorb(g.all_reduce(normal(dtype, {sum_of(rows), inner}, round), op));
    } else if (kind == 1) {
      absorb(g.reduce_scatter(normal(dtype, {sum_of(rows), inner}, round), rows, op));
    } else if (kind == 2) {
      absorb(g.all_gather(normal(dtype, {my_rows, inner}, round), rows));
    } else if (kind == 3) {
      absorb(g.broadcast(normal(dtype, {inner}, round),
                         static_cast<int>(shared.below(draw++, static_cast<std::uint64_t>(n)))));
    } else {  // rank i sends rows[i] to everyone
      absorb(g.all_to_all(normal(dtype, {my_rows * n, inner}, round), Rows(rows.size(), my_rows),
                          rows));
    }
  }
  // One hash for all ranks.
  const auto all =
      g.all_gather(at::full({1}, static_cast<std::int64_t>(hash), at::kLong).to(s.device));
  absorb(all);
  const auto total = g.all_reduce(
      at::full({1}, static_cast<std::int64_t>(hash >> 1), at::kLong).to(s.device), ReduceOp::max);
  return static_cast<std::uint64_t>(total.cpu().item<std::int64_t>());
}

}  // namespace moesh::comm::conformance
