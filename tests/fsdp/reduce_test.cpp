// Sums of gradients that travel in flat buffers while backward goes on.

#include "moesh/fsdp/reduce.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "moesh/fsdp/fsdp.h"
#include "tests/comm/trace.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;

// Three tensors, divided along different dimensions among three ranks, one of which has nothing of
// the second.
TEST(Flat, HoldsEveryElementOnce) {
  const std::vector<raw::FlatPart> parts{
      {{7, 2}, 0, {3, 2, 2}}, {{3, 2, 5}, 1, {1, 1, 0}}, {{4}, 0, {2, 1, 1}}};
  const raw::Flat flat(parts, 3);
  EXPECT_EQ(flat.numel(), 14 + 30 + 4);
  EXPECT_EQ(flat.rank_sizes(), (std::vector<std::int64_t>{6 + 15 + 2, 4 + 15 + 1, 4 + 1}));
  const at::Tensor message = at::full({flat.numel()}, -1.0, at::kDouble);
  std::vector<at::Tensor> whole;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    whole.push_back(at::arange(100)
                        .narrow(0, 0, at::empty(parts[i].shape).numel())
                        .add(100 * i)
                        .reshape(parts[i].shape)
                        .to(at::kFloat));
    flat.put_whole(message, i, whole[i]);
  }
  EXPECT_EQ(message.ge(0).sum().item<std::int64_t>(), flat.numel());
  EXPECT_EQ(std::get<0>(at::_unique(message)).numel(), flat.numel());
  std::int64_t first = 0;
  for (int rank = 0; rank < 3; ++rank) {
    const std::int64_t size = flat.rank_sizes()[static_cast<std::size_t>(rank)];
    const at::Tensor of_rank = message.narrow(0, first, size), again = at::empty_like(of_rank);
    first += size;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      std::int64_t start = 0;
      for (int r = 0; r < rank; ++r) start += parts[i].sizes[static_cast<std::size_t>(r)];
      const at::Tensor part =
          whole[i].narrow(parts[i].dim, start, parts[i].sizes[static_cast<std::size_t>(rank)]);
      EXPECT_TRUE(at::equal(flat.part_of_rank(of_rank, i, rank), part.to(at::kDouble)));
      flat.put_part(again, i, part, rank);
    }
    EXPECT_TRUE(at::equal(again, of_rank)) << "what the ranks put in is the same message";
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const at::Tensor rows = at::empty_like(whole[i].movedim(parts[i].dim, 0).contiguous());
    flat.take_whole(message, i, rows);
    EXPECT_TRUE(at::equal(rows.movedim(0, parts[i].dim), whole[i]));
  }
}

struct ReduceResult {
  std::vector<at::Tensor> gradients;
  std::vector<std::string> trace;
};

// A layer before the first block, as an embedding is, and three blocks y = tanh(w (v x)) of two
// parameters each; two micro-batches.
ReduceResult run(const Mesh& mesh, bool later) {
  constexpr std::int64_t n = 10;
  std::vector<Param<Dense{I, I, I}>> params;
  for (int i = 0; i < 7; ++i)
    params.emplace_back(ParamSpec{.name = "w" + std::to_string(i),
                                  .shape = {n, n},
                                  .storage_dim = i % 2,
                                  .dtype = at::kFloat,
                                  .compute = at::kBFloat16,
                                  .device = test_device()},
                        Init{.kind = Init::Distribution::normal, .scale = 0.3, .seed = 1});
  ReduceResult r;
  const comm::Trace trace;
  StepState reductions(later);
  for (int micro = 0; micro < 2; ++micro) {
    const auto input = as_leaf(
        assume<Dense{T, T, T}>(at::full({3, n}, 0.1 * (mesh.rank() + 1 + micro),
                                        at::TensorOptions(at::kBFloat16).device(test_device()))));
    auto y = linear(input, use(params[6]));
    for (std::size_t i = 0; i < 6; i += 2) {
      const auto x = begin_bucket(y);
      const auto inner = linear(x, use(params[i]));
      y = map_rows([](const at::Tensor& t) { return t.tanh(); }, linear(inner, use(params[i + 1])));
    }
    backward(sum_all(y));
    reductions.start_sums();
  }
  reductions.finish_sums();
  for (const auto& e : trace.entries())
    r.trace.push_back(e.group + " " + comm::to_string(e.op) + " " + std::to_string(e.bytes));
  for (auto& w : params) r.gradients.push_back(w.stored().value.grad().clone());
  return r;
}

class Reduce : public testing::TestWithParam<MeshShape> {};
INSTANTIATE_TEST_SUITE_P(Meshes, Reduce,
                         testing::Values(MeshShape{}, MeshShape{.dp_shard = 2},
                                         MeshShape{.dp_shard = 3},
                                         MeshShape{.dp_replicate = 2, .dp_shard = 2},
                                         MeshShape{.dp_replicate = 2},
                                         MeshShape{.dp_shard = 2, .cp = 2, .tp = 2}));

TEST_P(Reduce, GivesTheSameBitsAtOnceAndLater) {
  comm::launch(
      GetParam().num_ranks(),
      [](comm::Group& world) {
        const Mesh mesh(world, GetParam());
        const MeshScope scope(mesh);
        const ReduceResult now = run(mesh, false), later = run(mesh, true);
        for (std::size_t i = 0; i < now.gradients.size(); ++i)
          EXPECT_TRUE(at::equal(now.gradients[i], later.gradients[i])) << i;
      },
      test_options());
}

// One message a block and micro-batch, started when backward has passed the block; the same order
// on every rank.
TEST(Reduce, StartsBlockByBlockInOneOrder) {
  std::vector<std::vector<std::string>> traces(3);
  comm::launch(
      3,
      [&](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 3});
        const MeshScope scope(mesh);
        traces[static_cast<std::size_t>(world.rank())] = run(mesh, true).trace;
      },
      test_options());
  const auto count = [&](const std::string& op) {
    return std::count_if(traces[0].begin(), traces[0].end(), [&](const std::string& entry) {
      return entry.find(op) != std::string::npos;
    });
  };
  EXPECT_EQ(count("all_gather"), 2 * 7);
  constexpr std::int64_t kBytes = 10 * 10 * 4;
  std::vector<std::int64_t> bytes;
  for (const auto& entry : traces[0])
    if (entry.find("reduce_scatter") != std::string::npos)
      bytes.push_back(std::stoll(entry.substr(entry.rfind(' '))));
  std::vector<std::int64_t> expected;
  for (int micro = 0; micro < 2; ++micro)
    for (const std::int64_t num_params : {2, 2, 2, 1}) expected.push_back(num_params * kBytes);
  EXPECT_EQ(bytes, expected);
  const auto without_bytes = [](std::vector<std::string> trace) {  // of gathers: shards are uneven
    for (auto& entry : trace) entry.erase(entry.rfind(' '));
    return trace;
  };
  for (const auto& trace : traces) EXPECT_EQ(without_bytes(trace), without_bytes(traces[0]));
}

// Two blocks are under way: the sum over replicas, which follows that over shards, is asked for
// when the block after the next one starts.
TEST(Reduce, AwaitsABlockTwoBlocksLater) {
  std::vector<std::string> calls;
  comm::launch(
      4,
      [&](comm::Group& world) {
        const Mesh mesh(world, {.dp_replicate = 2, .dp_shard = 2});
        const MeshScope scope(mesh);
        const ReduceResult r = run(mesh, true);
        if (world.rank() != 0) return;
        for (const auto& entry : r.trace)
          for (const std::string op : {"reduce_scatter", "all_reduce"})
            if (entry.find(op) != std::string::npos) calls.push_back(op);
      },
      test_options());
  std::vector<std::string> expected{"reduce_scatter", "reduce_scatter"};
  for (int block = 2; block < 2 * 4; ++block)
    expected.insert(expected.end(), {"all_reduce", "reduce_scatter"});
  expected.insert(expected.end(), {"all_reduce", "all_reduce"});
  EXPECT_EQ(calls, expected);
}

// On one rank it stays in the type of the work, and is a sum in that of the master weights as soon
// as there is something to add.
TEST(Reduce, OfOneRankWidensAGradientToAddToIt) {
  const OneRankScope scope;
  const Param<Dense{I, I, I}> w({.name = "w",
                                 .shape = {5, 4},
                                 .dtype = at::kFloat,
                                 .compute = at::kBFloat16,
                                 .device = test_device()},
                                {.kind = Init::Distribution::normal});
  const Stored& stored = w.stored();
  at::Tensor sum = at::zeros({5, 4}, stored.value.detach().options());
  for (int micro = 0; micro < 3; ++micro) {
    const at::Tensor x = at::arange(12, sum.options()).reshape({3, 4}).add(0.37 * micro).tanh();
    const StepState step(true);
    backward(sum_all(linear(as_leaf(assume<Dense{T, T, T}>(x.to(at::kBFloat16))), use(w))));
    sum += at::ones({5, 3}, x.options().dtype(at::kBFloat16)).mm(x.to(at::kBFloat16));
    EXPECT_EQ(stored.value.grad().scalar_type(), micro == 0 ? at::kBFloat16 : at::kFloat);
    EXPECT_EQ(raw::gradient(stored).scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(raw::gradient(stored), sum)) << micro;
  }
}

// A gradient that is read outside of a step is there after backward.
TEST(Reduce, IsDoneAtOnceWithoutAScope) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const Param<Dense{I, I, I}> w(
            {.name = "w", .shape = {4}, .dtype = at::kDouble, .device = test_device()},
            {.kind = Init::Distribution::ones});
        const auto pass = [&] {
          const auto x = as_leaf(assume<Dense{T, T, T}>(
              at::ones({3, 4}, at::TensorOptions(at::kDouble).device(test_device()))));
          backward(sum_all(begin_bucket(x) * use(w)));
        };
        {
          StepState reductions(true);
          pass();
          EXPECT_FALSE(w.stored().value.grad().defined()) << "it is on its way";
          reductions.finish_sums();
          EXPECT_EQ(w.stored().value.grad().sum().item<double>(), 2 * 6);
        }
        pass();
        EXPECT_EQ(w.stored().value.grad().sum().item<double>(), 2 * 2 * 6);
      },
      test_options());
}

}  // namespace
}  // namespace moesh
