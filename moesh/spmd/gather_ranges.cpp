#include "moesh/spmd/gather_ranges.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "moesh/base/error.h"
#include "moesh/spmd/tensor.h"

namespace moesh::raw {
namespace {

PositionRanges intersection(const PositionRanges& a, const PositionRanges& b) {
  PositionRanges common;
  for (const PositionRange& x : a)
    for (const PositionRange& y : b)
      if (const auto both = moesh::intersection(x, y); both.length() > 0) common.push_back(both);
  return common;
}

// The row of a position among those of the ranges.
std::int64_t row_of(const PositionRanges& ranges, std::int64_t position) {
  std::int64_t before = 0;
  for (const PositionRange& r : ranges) {
    if (position < r.end) return before + position - r.begin;
    before += r.length();
  }
  throw Error(ErrorKind::internal, detail::concat("no row of position ", position));
}

// The rows at some of the positions that x has.
at::Tensor rows_of(const at::Tensor& x, const PositionRanges& has, const PositionRange& r) {
  return x.narrow(0, row_of(has, r.begin), r.length());
}

// Rows, and the position of the first.
using PlacedRows = std::pair<std::int64_t, at::Tensor>;

at::Tensor joined(const std::vector<at::Tensor>& parts, const at::Tensor& like, std::int64_t dim) {
  if (parts.empty()) return like.narrow(dim, 0, 0);
  return parts.size() == 1 ? parts[0] : at::cat(parts, dim);
}

at::Tensor in_order(std::vector<PlacedRows> parts, const at::Tensor& like, std::int64_t dim) {
  std::ranges::sort(parts, {}, &PlacedRows::first);
  std::vector<at::Tensor> rows;
  for (const PlacedRows& part : parts) rows.push_back(part.second);
  return joined(rows, like, dim);
}

// Which rows each rank sends to each other; dimension 0 is the sequence.
struct RangeExchange {
  std::shared_ptr<comm::Group> group;
  std::vector<PositionRanges> held, asked;  // of each rank

  size_t rank() const { return static_cast<size_t>(group->rank()); }
  const PositionRanges& mine() const { return held[rank()]; }
  const PositionRanges& reach() const { return asked[rank()]; }

  // The positions of rank `from` that rank `to` asks for, besides its own.
  PositionRanges sent(size_t from, size_t to) const {
    return from == to ? PositionRanges() : intersection(held[from], asked[to]);
  }
  std::vector<std::int64_t> num_sent() const {
    std::vector<std::int64_t> n;
    for (size_t r = 0; r < held.size(); ++r) n.push_back(total_length(sent(rank(), r)));
    return n;
  }
  std::vector<std::int64_t> num_received() const {
    std::vector<std::int64_t> n;
    for (size_t r = 0; r < held.size(); ++r) n.push_back(total_length(sent(r, rank())));
    return n;
  }
  // Every rank knows whether anybody sends anything.
  bool is_silent() const {
    for (size_t from = 0; from < held.size(); ++from)
      for (size_t to = 0; to < held.size(); ++to)
        if (!sent(from, to).empty()) return false;
    return true;
  }

  SentStep forward(const at::Tensor& x) const {
    std::vector<at::Tensor> to_others;
    for (size_t to = 0; to < held.size(); ++to)
      for (const PositionRange& r : sent(rank(), to)) to_others.push_back(rows_of(x, mine(), r));
    const auto results = [*this, x](const at::Tensor& got) {
      std::vector<PlacedRows> parts;
      for (const PositionRange& r : intersection(mine(), reach()))
        parts.emplace_back(r.begin, rows_of(x, mine(), r));
      std::int64_t first = 0;
      for (size_t from = 0; from < held.size(); ++from)
        for (const PositionRange& r : sent(from, rank())) {
          parts.emplace_back(r.begin, got.narrow(0, first, r.length()));
          first += r.length();
        }
      return Tensors{in_order(parts, x, 0)};
    };
    if (is_silent()) return {comm::Handle(x), results};
    return {group->start_all_to_all(joined(to_others, x, 0), num_sent(), num_received()), results};
  }

  SentStep backward(const at::Tensor& grad) const {
    auto shape = grad.sizes().vec();
    shape[0] = total_length(mine());
    const at::Tensor sum = at::zeros(shape, grad.options().dtype(wide_dtype(grad.scalar_type())));
    for (const PositionRange& r : intersection(mine(), reach()))
      rows_of(sum, mine(), r).copy_(rows_of(grad, reach(), r));
    const auto results = [*this, sum, dtype = grad.scalar_type()](const at::Tensor& back) {
      std::int64_t first = 0;
      for (size_t to = 0; to < held.size(); ++to)
        for (const PositionRange& r : sent(rank(), to)) {
          rows_of(sum, mine(), r) += back.narrow(0, first, r.length());
          first += r.length();
        }
      return Tensors{sum.to(dtype)};
    };
    if (is_silent()) return {comm::Handle(sum), results};
    std::vector<at::Tensor> copies;
    for (size_t from = 0; from < held.size(); ++from)
      for (const PositionRange& r : sent(from, rank())) copies.push_back(rows_of(grad, reach(), r));
    return {group->start_all_to_all(joined(copies, grad, 0), num_received(), num_sent()), results};
  }
};

// The same of tensors whose dimension `dim` is the sequence.
template <class F>
Begin along_dim(std::int64_t dim, F f) {
  return [dim, f](const Tensors& xs) {
    SentStep sent = f(xs[0].movedim(dim, 0));
    return SentStep{std::move(sent.message), [dim, results = sent.results](const at::Tensor& t) {
                      return Tensors{results(t)[0].movedim(0, dim)};
                    }};
  };
}

}  // namespace

at::Tensor rows_at(const at::Tensor& x, std::int64_t dim, const PositionRanges& ranges) {
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < ranges.size();) {
    PositionRange r = ranges[i++];  // with those that go on where it ends: a view is enough
    while (i < ranges.size() && ranges[i].begin == r.end) r.end = ranges[i++].end;
    parts.push_back(r.length() == x.size(dim) ? x : x.narrow(dim, r.begin, r.length()));
  }
  return joined(parts, x, dim);
}

at::Tensor by_position(const at::Tensor& x, std::int64_t dim, const PositionRanges& ranges) {
  if (std::ranges::is_sorted(ranges, {}, &PositionRange::begin)) return x;
  std::vector<PlacedRows> parts;
  std::int64_t first = 0;
  for (const PositionRange& r : ranges) {
    if (r.length() > 0) parts.emplace_back(r.begin, x.narrow(dim, first, r.length()));
    first += r.length();
  }
  return in_order(parts, x, dim);
}

MaybeAdjointPair gather_ranges(Axes axes, const RangesOfRanks& ranges) {
  const auto group = current_mesh().group(axes);
  const auto n = static_cast<size_t>(group->size());
  const auto &held = ranges.held, &asked = ranges.asked;
  MOESH_CHECK(held.size() == n && asked.size() == n, "gather_ranges on ", n, " ranks: it is said ",
              "what ", held.size(), " of them hold, and what ", asked.size(), " ask for");
  PositionRanges one_by_one;  // of all ranks
  std::vector<std::int64_t> sizes;
  for (const PositionRanges& r : held) {
    one_by_one.insert(one_by_one.end(), r.begin(), r.end());
    sizes.push_back(total_length(r));
  }
  const std::int64_t all = total_length(one_by_one);
  const auto dim = ranges.dim;
  bool all_want_all = true;
  for (size_t r = 0; r < n; ++r) {
    const std::int64_t num_asked = total_length(asked[r]);
    const bool has_own = total_length(intersection(held[r], asked[r])) == sizes[r];
    MOESH_CHECK(has_own || num_asked == 0, "gather_ranges: rank ", r, " holds ", describe(held[r]),
                " and asks for ", describe(asked[r]),
                ": it asks for its own rows too, or for none");
    MOESH_CHECK(total_length(intersection({{0, all}}, asked[r])) == num_asked,
                "gather_ranges: rank ", r, " asks for ", describe(asked[r]), " of ", all, " rows");
    all_want_all = all_want_all && num_asked == all;
  }
  if (n == 1 && all_want_all) return std::nullopt;
  if (all_want_all)  // what ranks hold, one behind the other, is put in order
    return AdjointPair{[=](const Tensors& xs) {
                         SentStep sent = begin(Step::all_gather, xs[0], *group, dim, sizes);
                         return SentStep{
                             std::move(sent.message),
                             [=, results = sent.results](const at::Tensor& t) {
                               return Tensors{by_position(results(t)[0], dim, one_by_one)};
                             }};
                       },
                       [=](const Tensors& grads) {
                         return begin(Step::reduce_scatter, rows_at(grads[0], dim, one_by_one),
                                      *group, dim, sizes);
                       }};
  const RangeExchange e{group, held, asked};
  return AdjointPair{along_dim(dim, [e](const at::Tensor& x) { return e.forward(x); }),
                     along_dim(dim, [e](const at::Tensor& grad) { return e.backward(grad); })};
}

}  // namespace moesh::raw
