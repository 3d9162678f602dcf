#include "moesh/spmd/gather_ranges.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/spmd/tensor.h"

namespace moesh::raw {
namespace {

std::int64_t length(const PositionRange& r) { return std::max<std::int64_t>(0, r.end - r.begin); }
PositionRange both(const PositionRange& a, const PositionRange& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Which rows each rank sends to each other; dimension 0 is the sequence.
struct RangeExchange {
  std::shared_ptr<comm::Group> group;
  std::vector<PositionRange> pieces, ranges;  // of each rank

  PositionRange piece() const { return pieces[static_cast<size_t>(group->rank())]; }
  PositionRange reach() const { return ranges[static_cast<size_t>(group->rank())]; }

  // The rows of rank `from` that rank `to` asks for, besides its own.
  std::int64_t rows(size_t from, size_t to) const {
    return from == to ? 0 : length(both(pieces[from], ranges[to]));
  }
  std::vector<std::int64_t> sent() const {
    std::vector<std::int64_t> n;
    for (size_t r = 0; r < pieces.size(); ++r)
      n.push_back(rows(static_cast<size_t>(group->rank()), r));
    return n;
  }
  std::vector<std::int64_t> received() const {
    std::vector<std::int64_t> n;
    for (size_t r = 0; r < pieces.size(); ++r)
      n.push_back(rows(r, static_cast<size_t>(group->rank())));
    return n;
  }
  // Every rank knows whether anybody sends anything.
  bool is_silent() const {
    for (size_t from = 0; from < pieces.size(); ++from)
      for (size_t to = 0; to < pieces.size(); ++to)
        if (rows(from, to) > 0) return false;
    return true;
  }
  // Rows of lower ranks that came, in their order: they lie before its own.
  std::int64_t num_before() const {
    const auto n = received();
    std::int64_t sum = 0;
    for (int r = 0; r < group->rank(); ++r) sum += n[static_cast<size_t>(r)];
    return sum;
  }

  SentStep forward(const at::Tensor& x) const {
    const PositionRange mine = piece(), own = both(mine, reach());
    const at::Tensor kept = x.narrow(0, own.begin - mine.begin, length(own));
    if (is_silent()) return {comm::Handle(kept), [](const at::Tensor& t) { return Tensors{t}; }};
    std::vector<at::Tensor> parts{x.narrow(0, 0, 0)};
    for (size_t r = 0; r < ranges.size(); ++r)
      if (rows(static_cast<size_t>(group->rank()), r) > 0) {
        const PositionRange asked = both(mine, ranges[r]);
        parts.push_back(x.narrow(0, asked.begin - mine.begin, length(asked)));
      }
    return {group->start_all_to_all(at::cat(parts), sent(), received()),
            [kept, before = num_before()](const at::Tensor& got) {
              return Tensors{at::cat(
                  {got.narrow(0, 0, before), kept, got.narrow(0, before, got.size(0) - before)})};
            }};
  }

  SentStep backward(const at::Tensor& grad) const {
    const PositionRange mine = piece(), own = both(mine, reach());
    auto shape = grad.sizes().vec();
    shape[0] = length(mine);
    const at::Tensor sum = at::zeros(shape, grad.options().dtype(wide_dtype(grad.scalar_type())));
    const auto before = num_before();
    sum.narrow(0, own.begin - mine.begin, length(own)).copy_(grad.narrow(0, before, length(own)));
    const auto dtype = grad.scalar_type();
    if (is_silent())
      return {comm::Handle(sum), [dtype](const at::Tensor& t) { return Tensors{t.to(dtype)}; }};
    const auto after = before + length(own);
    const at::Tensor copies =
        at::cat({grad.narrow(0, 0, before), grad.narrow(0, after, grad.size(0) - after)});
    return {group->start_all_to_all(copies, received(), sent()),
            [*this, sum, mine, dtype](const at::Tensor& back) {
              const auto n = sent();
              std::int64_t first = 0;
              for (size_t r = 0; r < n.size(); first += n[r++]) {
                if (n[r] == 0) continue;
                const std::int64_t at = both(mine, ranges[r]).begin - mine.begin;
                sum.narrow(0, at, n[r]) += back.narrow(0, first, n[r]);
              }
              return Tensors{sum.to(dtype)};
            }};
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

MaybeAdjointPair gather_ranges(Axes axes, const SplitDim& along,
                               const std::vector<PositionRange>& ranges) {
  const auto group = current_mesh().group(axes);
  const auto n = static_cast<size_t>(group->size());
  MOESH_CHECK(along.sizes.size() == n && ranges.size() == n, "gather_ranges on ", n,
              " ranks: ", along.sizes.size(), " pieces and ", ranges.size(), " ranges are given");
  std::vector<PositionRange> pieces;
  for (auto size : along.sizes) {
    const auto start = pieces.empty() ? 0 : pieces.back().end;
    pieces.push_back({start, start + size});
  }
  const PositionRange whole{0, pieces.back().end};
  for (size_t r = 0; r < n; ++r) {
    const bool has_own = length(both(pieces[r], ranges[r])) == length(pieces[r]);
    MOESH_CHECK(has_own || length(ranges[r]) == 0, "gather_ranges: rank ", r, " holds [",
                pieces[r].begin, ", ", pieces[r].end, ") and asks for [", ranges[r].begin, ", ",
                ranges[r].end, "): it asks for its own rows too, or for none");
    MOESH_CHECK(both(whole, ranges[r]) == ranges[r], "gather_ranges: rank ", r, " asks for [",
                ranges[r].begin, ", ", ranges[r].end, ") of ", whole.end, " rows");
  }
  const auto dim = along.dim;
  const bool all_want_all =
      std::all_of(ranges.begin(), ranges.end(), [&](const PositionRange& r) { return r == whole; });
  if (n == 1 && all_want_all) return std::nullopt;
  if (all_want_all) {
    const auto begins = [group, dim, sizes = along.sizes](Step step) -> Begin {
      return [=](const Tensors& xs) { return begin(step, xs[0], *group, dim, sizes); };
    };
    return AdjointPair{begins(Step::all_gather), begins(Step::reduce_scatter)};
  }
  const RangeExchange e{group, std::move(pieces), ranges};
  return AdjointPair{along_dim(dim, [e](const at::Tensor& x) { return e.forward(x); }),
                     along_dim(dim, [e](const at::Tensor& grad) { return e.backward(grad); })};
}

}  // namespace moesh::raw
