// Every transition, on every axis, for many ways to cut: it keeps the meaning of the tensor, and
// backward is the adjoint.

#include <gtest/gtest.h>

#include <cmath>

#include "moesh/base/error.h"
#include "moesh/base/random.h"
#include "moesh/spmd/spmd.h"
#include "moesh/types/token.h"
#include "tests/spmd/device.h"
#include "tests/spmd/on_mesh.h"

namespace moesh {
namespace {

using enum Place;

// One way to cut a tensor among n ranks.
struct Pattern {
  std::string name;
  std::vector<std::int64_t> shape;  // of the whole
  SplitDim along;
  std::vector<std::int64_t> sizes;  // of each rank
};

std::vector<Pattern> patterns(int n) {
  const auto pieces = [n](std::int64_t total) { return Pieces{total, n}.lengths(); };
  std::vector<std::int64_t> odd;
  for (int r = 0; r < n; ++r) odd.push_back((r * 3 + 1) % 4);
  std::int64_t odd_total = 0;
  for (auto s : odd) odd_total += s;
  return {
      {"even, dim 0", {2 * n, 3}, {.dim = 0}, pieces(2 * n)},
      {"even, last dim", {2, 3, n}, {.dim = -1}, pieces(n)},
      {"uneven total, dim 1", {2, 2 * n + 1, 3}, {.dim = 1, .total = 2 * n + 1}, pieces(2 * n + 1)},
      {"fewer than ranks",
       {2, std::max(1, n - 1), 1},
       {.dim = 1, .total = std::max(1, n - 1)},
       pieces(std::max(1, n - 1))},
      {"nothing at all", {0, 2}, {.dim = 0, .total = 0}, pieces(0)},
      {"any sizes, dim 0", {odd_total, 2}, {.dim = 0, .sizes = odd}, odd},
      {"any sizes, dim 1", {3, odd_total, 2}, {.dim = 1, .sizes = odd}, odd},
  };
}

std::vector<std::int64_t> local_shape(const Pattern& p, Place place, int rank) {
  auto shape = p.shape;
  if (varies(place))
    shape[p.along.dim < 0 ? shape.size() - 1 : static_cast<size_t>(p.along.dim)] =
        p.sizes[static_cast<size_t>(rank)];
  return shape;
}

// A random value of this placement: R and I are the same on every rank.
at::Tensor random_value(const Pattern& p, Place place, int rank, std::uint64_t seed) {
  at::Tensor x = at::empty(local_shape(p, place, rank), at::kDouble);
  const Random random(seed, is_whole(place) ? 0 : static_cast<std::uint64_t>(rank) + 1);
  for (std::int64_t i = 0; i < x.numel(); ++i)
    x.data_ptr<double>()[i] = random.normal(static_cast<std::uint64_t>(i));
  return x.to(test_device());
}

// What the tensor means as a whole: shards side by side, partial sums added up.
at::Tensor meaning(comm::Group& group, const at::Tensor& x, Place place, const Pattern& p) {
  if (is_whole(place)) return x;
  if (place == P) return group.all_reduce(x);
  const auto dim = p.along.dim < 0 ? x.dim() - 1 : p.along.dim;
  return group.all_gather(x.movedim(dim, 0), p.sizes).movedim(0, dim);
}

// <a, b> with a of this placement and b of its adjoint: a sum over all ranks, but I counts once.
double inner(comm::Group& group, const at::Tensor& a, const at::Tensor& b, Place place) {
  const at::Tensor mine = (a * b).sum();
  return (place == I ? mine : group.all_reduce(mine)).item<double>();
}

void expect_same_everywhere(comm::Group& group, const at::Tensor& x, const std::string& what) {
  const at::Tensor lowest = group.all_reduce(x, comm::ReduceOp::min),
                   highest = group.all_reduce(x, comm::ReduceOp::max);
  EXPECT_TRUE(at::equal(lowest, highest)) << what << " differs between ranks";
}

// f is a linear map from `from` to `to`.
void check_map(comm::Group& group, const Pattern& p, Place from, Place to, bool keeps_meaning,
               const std::function<at::Tensor(const at::Tensor&)>& f) {
  SCOPED_TRACE(std::string(1, letter(from)) + " -> " + letter(to) + ", " + p.name + ", " +
               std::to_string(group.size()) + " ranks");
  const int rank = group.rank();
  const at::Tensor x = random_value(p, from, rank, 11).requires_grad_(true);
  const at::Tensor y = f(x);
  EXPECT_EQ(y.sizes().vec(), local_shape(p, to, rank));
  if (keeps_meaning)
    EXPECT_TRUE(at::allclose(meaning(group, x.detach(), from, p), meaning(group, y.detach(), to, p),
                             1e-13, 1e-13));
  if (is_whole(to)) expect_same_everywhere(group, y.detach(), "result");

  const at::Tensor v = random_value(p, adjoint(to), rank, 12);
  y.backward(v);
  const at::Tensor g = x.grad();
  EXPECT_EQ(g.sizes(), x.sizes());
  if (is_whole(adjoint(from))) expect_same_everywhere(group, g, "gradient");
  const double left = inner(group, y.detach(), v, to), right = inner(group, x.detach(), g, from);
  EXPECT_NEAR(left, right, 1e-12 * std::max(1.0, std::abs(left)));
}

constexpr auto base_layout(Dense) { return Dense{I, I, I}; }
constexpr auto base_layout(Sparse) { return Sparse{I, I, I}; }

template <auto View, Axes A, Place From>
auto typed(const at::Tensor& x) {
  return assume<with(base_layout(View), A, From)>(x);
}

template <auto View, Axes A, Place S>
void check_letter(comm::Group& g, const Pattern& p) {
  const auto& a = p.along;
  // The cut of a whole value knows its total; a bare dimension means pieces of ceil(total / ranks).
  check_map(g, p, S, R, true,
            [&](const auto& x) { return local(all_gather<A>(typed<View, A, S>(x), a)); });
  check_map(g, p, S, I, true,
            [&](const auto& x) { return local(all_gather<A, I>(typed<View, A, S>(x), a)); });
  check_map(g, p, P, S, true,
            [&](const auto& x) { return local(reduce_scatter<A, S>(typed<View, A, P>(x), a)); });
  // Begun and awaited apart.
  check_map(g, p, S, R, true, [&](const auto& x) {
    return local(start_all_gather<A>(typed<View, A, S>(x), a).wait());
  });
  check_map(g, p, S, I, true, [&](const auto& x) {
    return local(start_all_gather<A, I>(typed<View, A, S>(x), a).wait());
  });
  check_map(g, p, P, S, true, [&](const auto& x) {
    return local(start_reduce_scatter<A, S>(typed<View, A, P>(x), a).wait());
  });
  check_map(g, p, I, S, true,
            [&](const auto& x) { return local(keep<A, S>(typed<View, A, I>(x), a)); });
  check_map(g, p, R, S, true,
            [&](const auto& x) { return local(keep<A, S>(typed<View, A, R>(x), a)); });
  check_map(g, p, S, P, true,
            [&](const auto& x) { return local(pad<A>(typed<View, A, S>(x), a)); });
}

template <auto View, Axes A>
void check_axis(comm::Group& g) {
  for (const auto& p : patterns(g.size())) {
    if (p.name != "even, last dim") check_letter<View, A, T>(g, p);  // features: they are refused
    check_letter<View, A, F>(g, p);
    check_letter<View, A, E>(g, p);
    check_map(g, p, P, R, true,
              [&](const auto& x) { return local(all_reduce<A>(typed<View, A, P>(x))); });
    check_map(g, p, P, I, true,
              [&](const auto& x) { return local(all_reduce<A, I>(typed<View, A, P>(x))); });
    check_map(g, p, I, R, true,
              [&](const auto& x) { return local(enter<A>(typed<View, A, I>(x))); });
    check_map(g, p, P, R, true, [&](const auto& x) {
      return local(start_all_reduce<A>(typed<View, A, P>(x)).wait());
    });
    check_map(g, p, P, I, true, [&](const auto& x) {
      return local(start_all_reduce<A, I>(typed<View, A, P>(x)).wait());
    });
    check_map(g, p, I, R, true,
              [&](const auto& x) { return local(start_enter<A>(typed<View, A, I>(x)).wait()); });
    check_map(g, p, R, P, true,
              [&](const auto& x) { return local(once<A>(typed<View, A, R>(x))); });
    check_map(g, p, I, P, true,
              [&](const auto& x) { return local(once<A>(typed<View, A, I>(x))); });
  }
  // as_term: a rank's own value is its term, so the shapes agree over the ranks.
  const Pattern term{
      "own term",
      {3, 2},
      {.dim = 0, .sizes = std::vector<std::int64_t>(static_cast<size_t>(g.size()), 3)},
      std::vector<std::int64_t>(static_cast<size_t>(g.size()), 3)};
  check_map(g, term, T, P, false,
            [&](const auto& x) { return local(as_term<A>(typed<View, A, T>(x))); });
}

class Transitions : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Transitions, testing::Values(1, 2, 3, 4));

TEST_P(Transitions, OnEveryDenseAxis) {
  const int n = GetParam();
  on_mesh({.dp_shard = n}, [](auto& world, auto&) { check_axis<Dense{}, dp>(world); });
  on_mesh({.dp_replicate = n}, [](auto& world, auto&) { check_axis<Dense{}, dp>(world); });
  on_mesh({.cp = n}, [](auto& world, auto&) { check_axis<Dense{}, cp>(world); });
  on_mesh({.tp = n}, [](auto& world, auto&) { check_axis<Dense{}, tp>(world); });
}

TEST_P(Transitions, OnEverySparseAxis) {
  const int n = GetParam();
  on_mesh({.dp_shard = n}, [](auto& world, auto&) { check_axis<Sparse{}, edp>(world); });
  on_mesh({.dp_shard = n, .ep = n}, [](auto& world, auto&) { check_axis<Sparse{}, ep>(world); });
  on_mesh({.tp = n, .etp = n}, [](auto& world, auto&) { check_axis<Sparse{}, etp>(world); });
}

TEST(TransitionsOnProducts, OfTwoAndThreeAxes) {
  on_mesh({.cp = 2, .tp = 2}, [](auto& world, auto&) { check_axis<Dense{}, cp | tp>(world); });
  on_mesh({.dp_shard = 2, .tp = 2},
          [](auto& world, auto&) { check_axis<Dense{}, dp | cp | tp>(world); });
  on_mesh({.dp_shard = 3, .ep = 3},
          [](auto& world, auto&) { check_axis<Sparse{}, ep | etp>(world); });
}

TEST(TransitionsOnProducts, OneAxisOfAMeshLeavesTheOthersAlone) {
  on_mesh({.dp_shard = 2, .tp = 2}, [](auto&, const Mesh& mesh) {
    check_axis<Dense{}, tp>(*mesh.group(tp));
    check_axis<Dense{}, dp>(*mesh.group(dp));
  });
}

TEST_P(Transitions, RowsGoToExpertsAndBack) {
  const int n = GetParam();
  on_mesh({.dp_shard = n, .ep = n}, [n](comm::Group& world, auto&) {
    const int rank = world.rank();
    // Rank i sends (i + 2 j) mod 3 rows to rank j.
    const auto rows = [](int i, int j) { return static_cast<std::int64_t>((i + 2 * j) % 3); };
    std::vector<std::int64_t> send, recv;
    std::int64_t num_send = 0, num_recv = 0;
    for (int j = 0; j < n; ++j) {
      send.push_back(rows(rank, j)), recv.push_back(rows(j, rank));
      num_send += send.back(), num_recv += recv.back();
    }
    at::Tensor x = at::empty({num_send, 2}, at::kDouble), v = at::empty({num_recv, 2}, at::kDouble);
    for (std::int64_t i = 0; i < x.numel(); ++i)
      x.data_ptr<double>()[i] = Random(1, rank).normal(static_cast<std::uint64_t>(i));
    for (std::int64_t i = 0; i < v.numel(); ++i)
      v.data_ptr<double>()[i] = Random(2, rank).normal(static_cast<std::uint64_t>(i));
    x = x.to(test_device()).requires_grad_(true), v = v.to(test_device());
    const auto at_experts = to_experts<ep>(assume<Sparse{T, T, T}>(x), send, recv);
    static_assert(decltype(at_experts)::layout == Sparse{T, E, T});
    const auto home = to_owners<ep>(at_experts, recv, send);
    EXPECT_TRUE(at::equal(local(home).detach(), x.detach()));
    local(at_experts).backward(v);
    EXPECT_NEAR(inner(world, local(at_experts).detach(), v, E),
                inner(world, x.detach(), x.grad(), T), 1e-12);
    const at::Tensor forth = x.grad().clone();
    EXPECT_TRUE(at::equal(world.all_to_all(v, recv, send), forth));
  });
}

TEST(TransitionErrors, NameTheSizesAndTheCure) {
  try {
    on_mesh({.tp = 2}, [](comm::Group& world, auto&) {
      const at::Tensor x = at::ones({world.rank() == 0 ? 2 : 1, 2}, at::kDouble);
      all_gather<tp>(assume<Dense{I, I, T}>(x), {.dim = 0, .sizes = {2, 2}});
    });
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "all_gather along dimension 0: rank 1 of group 'tp' has size 1, and the parts [2, 2] want 2; pass SplitDim{dim, "
        "total} or SplitDim{.dim, .sizes} with the true sizes");
  }
}

TEST(TransitionErrors, TokensAreNotCutAlongFeatures) {
  for (int ranks : {1, 2})
    on_mesh({.tp = ranks}, [](auto&, auto&) {
      const auto x = assume<Dense{T, T, I}>(at::ones({2, 4, 6}));
      EXPECT_NO_THROW(keep<tp>(x, {.dim = 1}));
      EXPECT_NO_THROW((keep<tp, F>(x, {.dim = 2})));
      const auto rows = assume<Dense{T, T, I}>(at::ones({2, 4}));
      EXPECT_NO_THROW(keep<tp>(rows, {.dim = 0}));
      EXPECT_NO_THROW((keep<tp, F>(rows, {.dim = 1})));
      EXPECT_THROW(keep<tp>(rows, {.dim = 1}), Error);
      try {
        keep<tp>(x, {.dim = -1});
        FAIL() << "nothing was thrown";
      } catch (const Error& e) {
        EXPECT_STREQ(
            e.what(),
            "keep of tokens (T on tp) along dimension 2 of a tensor [2, 4, 6], which holds "
            "features; tokens are dimension 0 of [N, D], 0 and 1 of [B, L, D]");
      }
    });
}

TEST(Crossing, IsCheckedAtRunTimeWhereLettersDiffer) {
  on_mesh({.dp_shard = 2, .tp = 2, .ep = 2}, [](auto&, auto&) {
    const auto x = assume<Dense{T, T, R}>(at::ones({1}));
    static_assert(decltype(sparse(x))::layout == Sparse{T, R, R});
    static_assert(decltype(dense(sparse(x)))::layout == Dense{T, T, R});
    EXPECT_EQ(local(sparse(x)).item<double>(), 1);
  });
  on_mesh({.dp_shard = 2, .tp = 2, .ep = 4}, [](auto&, auto&) {
    EXPECT_THROW(sparse(assume<Dense{T, T, R}>(at::ones({1}))), Error);
    EXPECT_NO_THROW(sparse(assume<Dense{T, T, T}>(at::ones({1}))));
    EXPECT_THROW(dense(assume<Sparse{T, R, R}>(at::ones({1}))), Error);
    EXPECT_NO_THROW(dense(assume<Sparse{T, T, T}>(at::ones({1}))));
  });
}

TEST(SumOverStages, AddsWhatEachStageHas) {
  comm::launch(
      4,
      [](comm::Group& world) {
        const Mesh mesh(world, {.pp = 2, .tp = 2});
        const MeshScope scope(mesh);
        const auto x = assume<Dense{I, I, I}>(
            at::full({3}, mesh.coordinate(pp) == 0 ? 5.0 : 7.0, at::kDouble));
        EXPECT_TRUE(at::equal(local(sum_over_stages(x)), at::full({3}, 12.0, at::kDouble)));
      },
      test_options());
}

}  // namespace
}  // namespace moesh
