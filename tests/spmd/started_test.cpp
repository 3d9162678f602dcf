// What is begun and awaited apart: backward is the adjoint, and begins where forward waits.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/spmd/attach.h"
#include "moesh/spmd/gather_ranges.h"
#include "moesh/spmd/rows.h"
#include "tests/comm/trace.h"
#include "tests/expect_error.h"
#include "tests/spmd/device.h"
#include "tests/spmd/on_mesh.h"

namespace moesh {
namespace {

using enum Place;
using Events = std::vector<std::string>;

// What this rank's thread calls and waits for, and what is done in between.
class EventLog final : public comm::ThreadObserver {
 public:
  void called(const comm::Operation& o) override {
    names_[o.number] = "group " + o.group.name();
    events_.push_back("begin " + names_[o.number]);
  }
  void waits(std::int64_t number) override { events_.push_back("await " + names_.at(number)); }
  void note(const std::string& what) { events_.push_back(what); }
  Events take() { return std::exchange(events_, {}); }

 private:
  std::map<std::int64_t, std::string> names_;
  Events events_;
};

// x; notes when it is computed, and when its gradient is.
template <auto L>
Tensor<L> noted(EventLog& log, const Tensor<L>& x, const std::string& what) {
  log.note(what);
  return assume<L>(raw::attach(x.local(), x.local().detach(), [&log, what](const at::Tensor& g) {
    log.note(what);
    return g;
  }));
}

at::Tensor random_rows(at::IntArrayRef shape) {
  return at::randn(shape, at::kDouble).to(test_device());
}

// Rank i sends (i + 2 j) % 3 rows to rank j.
struct RowsOf {
  std::vector<std::int64_t> send, recv;
  std::int64_t num_send = 0, num_recv = 0;
  RowsOf(int rank, int n) {
    const auto rows = [](int i, int j) { return static_cast<std::int64_t>((i + 2 * j) % 3); };
    for (int j = 0; j < n; ++j) {
      send.push_back(rows(rank, j)), recv.push_back(rows(j, rank));
      num_send += send.back(), num_recv += recv.back();
    }
  }
};

double inner_product(comm::Group& world, const at::Tensor& a, const at::Tensor& b) {
  return world.all_reduce((a.detach() * b).sum()).item<double>();
}

// <f(x), y> == <x, f'(y)> over the world.
template <class In, class F>
void expect_adjoint(comm::Group& world, const In& x, F f) {
  const auto out = f(x);
  const at::Tensor y = random_rows(local(out).sizes());
  local(out).backward(y);
  EXPECT_NEAR(inner_product(world, local(out), y), inner_product(world, local(x), local(x).grad()),
              1e-12);
}

TEST(Started, RowsAndTheirAdjoints) {
  for (int n : {1, 2, 3, 4})
    on_mesh({.dp_shard = n, .ep = n}, [n](comm::Group& world) {
      at::manual_seed(world.rank());
      const RowsOf rows(world.rank(), n);
      const auto at_home = as_leaf(assume<Sparse{T, T, T}>(random_rows({rows.num_send, 2})));
      const auto at_experts = as_leaf(assume<Sparse{T, E, T}>(random_rows({rows.num_recv, 2})));
      expect_adjoint(world, at_home, [&](const auto& x) {
        return start_to_experts<ep>(rows.send, rows.recv, x).wait();
      });
      expect_adjoint(world, at_experts, [&](const auto& x) {
        return start_to_owners<ep>(x, rows.recv, rows.send).wait();
      });
      EXPECT_TRUE(at::equal(
          local(start_to_owners<ep>(start_to_experts<ep>(rows.send, rows.recv, at_home).wait(),
                                    rows.recv, rows.send)
                    .wait()),
          local(at_home)));
    });
}

// Two tensors in one message, of which one has a gradient, and none.
TEST(Started, OnlyWhatHasAGradientComesBack) {
  on_mesh({.dp_shard = 2, .ep = 2}, [](comm::Group& world) {
    const RowsOf rows(world.rank(), 2);
    const auto x = as_leaf(assume<Sparse{T, T, T}>(random_rows({rows.num_send, 2})));
    const auto fixed = assume<Sparse{T, T, T}>(random_rows({rows.num_send}));
    const auto [moved, fixed_moved] = start_to_experts<ep>(rows.send, rows.recv, fixed, x).wait();
    EXPECT_FALSE(local(moved).requires_grad());
    EXPECT_TRUE(at::equal(local(moved), world.all_to_all(local(fixed), rows.send, rows.recv)));
    const at::Tensor y = random_rows(local(fixed_moved).sizes());
    local(fixed_moved).backward(y);
    EXPECT_TRUE(at::equal(local(x).grad(), world.all_to_all(y, rows.recv, rows.send)));
    const auto still = start_to_experts<ep>(rows.send, rows.recv, fixed).wait();
    EXPECT_FALSE(local(still).requires_grad());
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(local(start_to_experts<ep>(rows.send, rows.recv, x).wait()).requires_grad());
  });
}

TEST(Started, NodesAndTheirAdjoints) {
  on_mesh({.dp_shard = 4, .ep = 4, .ranks_per_node = 2}, [](comm::Group& world, const Mesh& mesh) {
    at::manual_seed(world.rank());
    const RowsOf rows(mesh.coordinate(ep_nodes), 2);
    const auto x = as_leaf(assume<Sparse{T, T, T}>(random_rows({rows.num_send, 2})));
    expect_adjoint(world, x,
                   [&](const auto& t) { return start_to_nodes(rows.send, rows.recv, t).wait(); });
    local(x).mutable_grad().reset();
    expect_adjoint(world, x, [&](const auto& t) {
      const auto at_node = start_to_nodes(rows.send, rows.recv, t).wait();
      return start_to_owners(at_node, rows.recv, rows.send).wait();
    });
  });
}

// What lies between begin and await in forward lies between them in backward: every kind of pair.
template <auto L, class Start>
void expect_between(const Tensor<L>& x, const std::string& group, bool is_silent_forward,
                    Start start) {
  EventLog log;
  const auto other = as_leaf(assume<L>(at::ones_like(local(x))));
  auto moving = start(x);
  const auto meanwhile = noted(log, other, "other work");
  const auto y = moving.wait();
  const Events between{"begin group " + group, "other work", "await group " + group};
  EXPECT_EQ(log.take(), is_silent_forward ? Events{"other work"} : between);
  (local(y).sum() + local(meanwhile).sum()).backward();
  EXPECT_EQ(log.take(), between);
}

TEST(Started, WhatIsBetweenInForwardIsBetweenInBackward) {
  on_mesh({.dp_shard = 2, .ep = 2}, [](comm::Group& world) {
    const RowsOf rows(world.rank(), 2);
    const auto home = as_leaf(assume<Sparse{T, T, T}>(random_rows({rows.num_send, 2})));
    const auto away = as_leaf(assume<Sparse{T, E, T}>(random_rows({rows.num_recv, 2})));
    const auto even = as_leaf(assume<Sparse{T, T, T}>(random_rows({2, 2})));
    const auto term = as_leaf(assume<Sparse{T, P, T}>(random_rows({2, 2})));
    const auto same = as_leaf(assume<Sparse{T, I, T}>(at::ones({2, 2}, at::kDouble)));
    expect_between(home, "ep", false,
                   [&](const auto& x) { return start_to_experts<ep>(rows.send, rows.recv, x); });
    expect_between(away, "ep", false,
                   [&](const auto& x) { return start_to_owners<ep>(x, rows.recv, rows.send); });
    expect_between(even, "ep", false,
                   [](const auto& x) { return start_all_gather_together<ep>({2, 2}, x); });
    expect_between(even, "ep", false,
                   [](const auto& x) { return start_all_gather<ep>(x, {.dim = 0}); });
    expect_between(term, "ep", false,
                   [](const auto& x) { return start_reduce_scatter<ep>(x, {.dim = 0}); });
    expect_between(term, "ep", false, [](const auto& x) { return start_all_reduce<ep>(x); });
    expect_between(same, "ep", true, [](const auto& x) { return start_enter<ep>(x); });
  });
  on_mesh({.cp = 2}, [](comm::Group&) {
    const auto piece = as_leaf(assume<Dense{T, T, F}>(random_rows({2, 2})));
    expect_between(piece, "cp", false, [](const auto& x) {
      return start_gather_ranges<cp>(
          x, {.dim = 0, .held = {{{0, 2}}, {{2, 4}}}, .asked = {{{0, 3}}, {{1, 4}}}});
    });
  });
}

// Two messages under way at once: backward awaits each where it was begun.
TEST(Started, EachGradientBelongsToItsOwnMessage) {
  on_mesh({.dp_shard = 2, .ep = 2}, [](comm::Group& world) {
    const RowsOf rows(world.rank(), 2);
    const auto a = as_leaf(assume<Sparse{T, T, T}>(random_rows({rows.num_send, 2})));
    const auto b = as_leaf(assume<Sparse{T, T, T}>(random_rows({rows.num_send, 2})));
    auto first = start_to_experts<ep>(rows.send, rows.recv, a),
         second = start_to_experts<ep>(rows.send, rows.recv, b);
    const auto a_there = first.wait(), b_there = second.wait();
    const at::Tensor va = random_rows(local(a_there).sizes()),
                     vb = random_rows(local(b_there).sizes());
    ((local(a_there) * va).sum() + (local(b_there) * vb).sum()).backward();
    EXPECT_TRUE(at::equal(local(a).grad(), world.all_to_all(va, rows.recv, rows.send)));
    EXPECT_TRUE(at::equal(local(b).grad(), world.all_to_all(vb, rows.recv, rows.send)));
  });
}

TEST(Started, IsAwaitedOnce) {
  on_mesh({}, [](comm::Group&) {
    auto moving = start_to_experts<ep>({2}, {2}, assume<Sparse{T, T, T}>(at::ones({2, 1})));
    moving.wait();
    expect_parts(error_of([&] { moving.wait(); }, ErrorKind::internal), {"awaited twice"});
  });
}

// Rows under way that arrive, are brought to the stream, and added up.
template <class F>
void expect_as_of_values(const at::Tensor& value, F f) {
  const auto leaf = value.clone().requires_grad_(true), same = value.clone().requires_grad_(true);
  const at::Tensor y = f(leaf);
  const comm::Trace trace;
  // What no gradient needs, with the graph of a value: x + 0 x of nothing.
  const at::Tensor none = raw::attach(same, raw::not_computed(same.sizes(), same.options()),
                                      [](const at::Tensor& g) { return g; });
  const at::Tensor of_none = f(none);
  EXPECT_EQ(trace.entries().size(), 0U) << "sent";
  EXPECT_TRUE(raw::is_not_computed(of_none));
  EXPECT_TRUE(of_none.isnan().all().template item<bool>());
  ASSERT_EQ(of_none.sizes(), y.sizes());
  const at::Tensor weights = random_rows(y.sizes());
  y.backward(weights);
  const std::size_t num_sent = trace.entries().size();
  of_none.backward(weights);
  EXPECT_EQ(trace.entries().size(), 2 * num_sent) << "backward sends the same";
  EXPECT_TRUE(at::equal(same.grad(), leaf.grad()));
}

TEST(NotComputed, GoesNowhereAndHasTheGradientOfAValue) {
  on_mesh({.dp_shard = 3, .ep = 3}, [](comm::Group& world) {
    at::manual_seed(world.rank());
    const RowsOf rows(world.rank(), 3);
    expect_as_of_values(random_rows({rows.num_send, 2}), [&](const at::Tensor& x) {
      return local(start_to_owners<ep>(assume<Sparse{T, E, T}>(x), rows.send, rows.recv).wait());
    });
    expect_as_of_values(random_rows({rows.num_send, 2}), [&](const at::Tensor& x) {
      return local(to_owners<ep>(assume<Sparse{T, E, T}>(x), rows.send, rows.recv));
    });
  });
  on_mesh({.tp = 3}, [](comm::Group& world) {
    const SplitDim along{.dim = 0, .sizes = {1, 3, 0}};
    const auto mine = along.sizes[static_cast<std::size_t>(world.rank())];
    using Shard = Tensor<Dense{T, T, T}>;
    using Whole = Tensor<Dense{T, T, P}>;
    at::manual_seed(world.rank());
    expect_as_of_values(random_rows({4, 2}), [&](const at::Tensor& x) {
      return local(reduce_scatter<tp>(Whole::assume(x), along));
    });
    expect_as_of_values(random_rows({mine, 2}), [&](const at::Tensor& x) {
      return local(all_gather<tp, I>(Shard::assume(x), along));
    });
    at::manual_seed(7);  // gradients of I are the same on all ranks
    expect_as_of_values(random_rows({4, 2}), [&](const at::Tensor& x) {
      return local(all_reduce<tp, I>(Whole::assume(x)));
    });
    const at::Tensor other = random_rows({4, 2});
    expect_as_of_values(random_rows({4, 2}), [&](const at::Tensor& x) {
      const auto sum = Whole::assume(x) + Whole::assume(other);
      return local(unflatten(Whole::assume(other) + (sum + sum), 0, {2, 2}));
    });
  });
}

}  // namespace
}  // namespace moesh
