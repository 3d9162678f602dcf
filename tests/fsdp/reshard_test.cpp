#include "moesh/fsdp/reshard.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "tests/comm/trace.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;

struct ReshardResult {
  std::vector<at::Tensor> gradients;
  at::Tensor y;
  GatherBytes bytes;
  std::vector<std::string> trace;
};

// Four layers y = x w, each gathered from shards; with and without resharding.
ReshardResult run_reshard(const Mesh& mesh, bool reshard) {
  constexpr std::int64_t n = 400;  // a gather of 1.2 MiB
  std::vector<Param<Dense{I, I, I}>> layers;
  for (int i = 0; i < 4; ++i)
    layers.emplace_back(ParamSpec{.name = "w" + std::to_string(i),
                                  .shape = {n, n},
                                  .storage_dim = i % 2,
                                  .dtype = at::kDouble,
                                  .device = test_device()},
                        Init{.kind = Init::Distribution::normal, .scale = 0.05, .seed = 1});
  const auto x = as_leaf(assume<Dense{T, T, T}>(at::full(
      {3, n}, 0.1 * (mesh.rank() + 1), at::TensorOptions(at::kDouble).device(test_device()))));
  StepState::current()->reset_bytes();
  ReshardResult r;
  const comm::Trace trace;
  auto y = x;
  std::shared_ptr<raw::Gathers> before;
  const auto layer = [&](const auto& w, const auto& in) {
    return map_rows([](const at::Tensor& t) { return t.tanh(); }, linear(in, use(w)));
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    if (!reshard) {
      y = layer(layers[i], y);
      continue;
    }
    if (i + 1 < layers.size()) prefetch({&layers[i + 1].stored()});
    ReshardScope scope(before);
    before = scope.gathers();
    y = scope.enter(y);
    y = scope.leave(layer(layers[i], y));
  }
  r.y = local(y).detach();
  backward(sum_all(y));
  r.bytes = StepState::current()->bytes();
  for (auto& w : layers) r.gradients.push_back(local(grad(w)));
  r.gradients.push_back(local(grad(x)));
  for (const auto& e : trace.entries()) r.trace.push_back(comm::to_string(e.op));
  return r;
}

TEST(Reshard, GivesTheSameBitsWithLessMemory) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const StepState state;
        const ReshardResult kept = run_reshard(mesh, false), freed = run_reshard(mesh, true);
        EXPECT_TRUE(at::equal(kept.y, freed.y));
        for (size_t i = 0; i < kept.gradients.size(); ++i)
          EXPECT_TRUE(at::equal(kept.gradients[i], freed.gradients[i])) << i;
        const std::int64_t one = 400 * 400 * 8;
        EXPECT_EQ(freed.bytes.now, 0) << "everything is freed in the end";
        EXPECT_EQ(freed.bytes.most, 2 * one) << "this layer and the next, never all four";
      },
      test_options());
}

// Not only the count: the storage that autograd's saved tensors use has no memory between forward
// and backward.
TEST(Reshard, GivesTheMemoryOfAGatherBack) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const StepState state;
        const Param<Dense{I, I, I}> w(
            {.name = "w", .shape = {6, 4}, .dtype = at::kDouble, .device = test_device()},
            {.kind = Init::Distribution::ones});
        const auto x = as_leaf(assume<Dense{T, T, T}>(
            at::ones({3, 4}, at::TensorOptions(at::kDouble).device(test_device()))));
        ReshardScope gathers;
        const auto in = gathers.enter(x);
        const auto gathered = use(w);
        const at::Storage memory = local(gathered).storage();
        EXPECT_NE(memory.data(), nullptr);
        const auto y = gathers.leave(linear(in, gathered));
        EXPECT_EQ(memory.data(), nullptr);
        backward(sum_all(y));
        EXPECT_EQ(memory.data(), nullptr);
        EXPECT_TRUE(at::equal(local(grad(x)).cpu(), at::full({3, 4}, 6.0, at::kDouble)));
      },
      test_options());
}

TEST(Reshard, GathersInTheOrderOfUseAndOnceMoreInBackward) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const StepState state;
        const ReshardResult r = run_reshard(mesh, true);
        std::vector<std::string> expected(
            4, "all_gather");  // layer 1 ahead of layer 0's use, and so on
        // Backward gathers the last layer when it begins, and each one before it while the one
        // after it computes.
        expected.push_back("all_gather");
        for (int i = 0; i < 3; ++i)
          expected.push_back("all_gather"), expected.push_back("reduce_scatter");
        expected.push_back("reduce_scatter");
        // The gathers of the gradients for the comparison come last.
        for (int i = 0; i < 4; ++i) expected.push_back("all_gather");
        EXPECT_EQ(r.trace, expected);
      },
      test_options());
}

TEST(Reshard, APrefetchThatAnUpdateOvertookIsNotUsed) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const StepState state;
        const Param<Dense{I, I, I}> w(
            {.name = "w", .shape = {6}, .dtype = at::kDouble, .device = test_device()},
            {.kind = Init::Distribution::ones});
        prefetch({&w.stored()});
        {
          const at::NoGradGuard no_grad;
          at::Tensor(w.stored().value).fill_(5);
        }
        EXPECT_TRUE(at::equal(local(use(w)).detach().cpu(), at::full({6}, 5.0, at::kDouble)));
      },
      test_options());
}

// Parameters of one call travel in one message for each dtype and group, whatever their shapes and
// however unevenly they are divided.
TEST(Reshard, PrefetchesInOneMessage) {
  comm::launch(
      3,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 3});
        const MeshScope scope(mesh);
        const StepState state;
        const auto make = [](const char* name, std::vector<std::int64_t> shape, std::int64_t dim,
                             at::ScalarType compute) {
          return Param<Dense{I, I, I}>(ParamSpec{.name = name,
                                                 .shape = std::move(shape),
                                                 .storage_dim = dim,
                                                 .dtype = at::kFloat,
                                                 .compute = compute,
                                                 .device = test_device()},
                                       Init{.kind = Init::Distribution::normal, .seed = 3});
        };
        const Param<Dense{I, I, I}> all[] = {
            make("a", {7, 3}, 0, at::kFloat), make("b", {4, 5, 2}, 1, at::kFloat),
            make("c", {2}, 0, at::kFloat), make("d", {6, 4}, 1, at::kBFloat16)};
        std::vector<at::Tensor> alone;
        for (const auto& w : all) alone.push_back(local(use(w)).detach());
        const comm::Trace trace;
        prefetch({&all[0].stored(), &all[3].stored(), &all[1].stored(), &all[2].stored()});
        EXPECT_EQ(trace.entries().size(), 2u);
        for (size_t i = 0; i < 4; ++i)
          EXPECT_TRUE(at::equal(local(use(all[i])).detach(), alone[i])) << i;
        EXPECT_EQ(trace.entries().size(), 2u);
      },
      test_options());
}

// A copy in the type of the work is what is gathered: nothing is cast.
TEST(Reshard, GathersCopies) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const StepState state;
        Param<Dense{I, I, I}> w({.name = "w",
                                 .shape = {4},
                                 .dtype = at::kFloat,
                                 .compute = at::kBFloat16,
                                 .device = test_device()},
                                {.kind = Init::Distribution::ones});
        raw::keep_copy(w.stored());
        EXPECT_EQ(local(use(w)).sum().item<double>(), 4);
        w.stored().copy->value.fill_(3);  // as nobody does: what is read shows
        EXPECT_EQ(local(use(w)).sum().item<double>(), 12);
        prefetch({&w.stored()});
        EXPECT_EQ(local(use(w)).sum().item<double>(), 12);
      },
      test_options());
}

// Every gather is counted once while it is there, and none where nothing is gathered.
TEST(Reshard, CountsTheBytesOfAPrefetchOnce) {
  const ParamSpec spec{.name = "w", .shape = {6, 5}, .dtype = at::kDouble, .device = test_device()};
  comm::launch(
      2,
      [&](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const StepState state;
        const Param<Dense{I, I, I}> w(spec);
        const std::int64_t before = StepState::current()->bytes().now, one = 6 * 5 * 8;
        prefetch({&w.stored()});
        prefetch({&w.stored()});  // is under way
        EXPECT_EQ(StepState::current()->bytes().now, before + one);
        {
          const ReshardScope gathers;
          use(w);
        }
        use(w);  // after the prefetch was taken, and outside of the scope
        EXPECT_EQ(StepState::current()->bytes().now, before + one) << "the scope has it";
        prefetch({&w.stored()});
        use(w);
        EXPECT_GT(StepState::current()->bytes().most, StepState::current()->bytes().now);
        StepState::current()->reset_bytes();
        EXPECT_EQ(StepState::current()->bytes().most, StepState::current()->bytes().now);
      },
      test_options());
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const StepState state;
  const Param<Dense{I, I, I}> w(spec);
  const std::int64_t before = StepState::current()->bytes().now;
  prefetch({&w.stored()});
  EXPECT_EQ(StepState::current()->bytes().now, before) << "one rank gathers nothing";
}

// What was prefetched ends with the step, whether it was used or not: nothing is taken for a value
// that the next step has at the same address.
TEST(Reshard, AStepForgetsWhatItPrefetched) {
  comm::launch(
      2,
      [](comm::Group& world) {
        const Mesh mesh(world, {.dp_shard = 2});
        const MeshScope scope(mesh);
        const Param<Dense{I, I, I}> w(
            {.name = "w", .shape = {6, 5}, .dtype = at::kDouble, .device = test_device()});
        const auto num_gathers = [&] {
          const comm::Trace trace;
          EXPECT_EQ(local(use(w)).size(0), 6);
          return trace.entries().size();
        };
        {
          const StepState state;
          prefetch({&w.stored()});
          EXPECT_EQ(num_gathers(), 0u);
          prefetch({&w.stored()});
        }
        EXPECT_EQ(num_gathers(), 1u);
        try {
          const StepState state;
          prefetch({&w.stored()});
          throw Error(ErrorKind::data, "a fault");
        } catch (const Error&) {
        }
        {
          const StepState state;
          EXPECT_EQ(state.bytes().now, 0);
          EXPECT_EQ(num_gathers(), 1u);
        }
        prefetch({&w.stored()});
        EXPECT_EQ(num_gathers(), 1u) << "outside of a step nothing is gathered ahead";
      },
      test_options());
}

// One rank gathers nothing, and casts: master weights in float32, work in bfloat16.
ParamSpec cast_spec() {
  return {.name = "w",
          .shape = {6, 4},
          .dtype = at::kFloat,
          .compute = at::kBFloat16,
          .device = test_device()};
}

TEST(Reshard, GivesTheMemoryOfACastBackAndCastsAgain) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const StepState state;
  const Param<Dense{I, I, I}> w(cast_spec(),
                                {.kind = Init::Distribution::normal, .scale = 1, .seed = 3});
  const auto x = as_leaf(assume<Dense{T, T, T}>(
      at::ones({3, 4}, at::TensorOptions(at::kBFloat16).device(test_device()))));
  const std::int64_t before = StepState::current()->bytes().now, one = 6 * 4 * 2;
  StepState::current()->reset_bytes();
  ReshardScope gathers;
  const auto in = gathers.enter(x);
  const auto cast = use(w);
  const at::Storage memory = local(cast).storage();
  EXPECT_EQ(StepState::current()->bytes().now, before + one);
  const auto y = gathers.leave(linear(in, cast));
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(StepState::current()->bytes().now, before);
  StepState::current()->reset_bytes();
  backward(sum_all(y));
  EXPECT_EQ(memory.data(), nullptr);
  EXPECT_EQ(StepState::current()->bytes().now, before);
  EXPECT_EQ(StepState::current()->bytes().most, before + one) << "it was there for backward";
  const at::Tensor rounded = w.stored().value.detach().to(at::kBFloat16).to(at::kFloat);
  const at::Tensor want = rounded.sum(at::IntArrayRef{0}).expand({3, 4});
  EXPECT_TRUE(at::allclose(local(grad(x)).to(at::kFloat), want, 2e-2, 2e-2));
}

TEST(Reshard, FreesACastThatBackwardWillWantAndNoOther) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const StepState state;
  const Param<Dense{I, I, I}> w(cast_spec());
  ParamSpec wide = cast_spec(), of_one = cast_spec(), empty = cast_spec();
  wide.compute = at::kFloat, of_one.shape = {1}, empty.shape = {0, 4};
  const std::int64_t before = StepState::current()->bytes().now;
  use(w);
  EXPECT_EQ(StepState::current()->bytes().now, before) << "outside of a scope";
  const ReshardScope gathers;
  {
    const at::NoGradGuard no_grad;
    use(w);
  }
  use(Param<Dense{I, I, I}>(wide));
  use(Param<Dense{I, I, I}>(empty));
  EXPECT_EQ(StepState::current()->bytes().now, before) << "nothing was cast for backward";
  use(Param<Dense{I, I, I}>(of_one));
  EXPECT_EQ(StepState::current()->bytes().now, before + 2);
}

// A copy in the dtype of the work is cast when the weight has changed, and taken as it is when
// someone says that he wrote both.
TEST(ComputeCopy, FollowsItsWeight) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const StepState state;
  Param<Dense{I, I, I}> w(cast_spec(), {.kind = Init::Distribution::normal, .scale = 1, .seed = 3});
  Stored& stored = w.stored();
  raw::keep_copy(stored);
  ASSERT_TRUE(stored.copy);
  EXPECT_EQ(stored.copy->value.sizes(), stored.value.sizes());
  EXPECT_EQ(stored.copy->value.scalar_type(), at::kBFloat16);
  const auto used = [&] { return local(use(w)).detach(); };
  const auto rounded = [&] { return stored.value.detach().to(at::kBFloat16); };
  EXPECT_TRUE(at::equal(used(), rounded()));
  EXPECT_EQ(used().data_ptr(), stored.copy->value.data_ptr());
  const at::NoGradGuard no_grad;
  stored.value.mul_(3);
  EXPECT_TRUE(at::equal(used(), rounded()));
  stored.copy->value.fill_(7);
  EXPECT_TRUE(used().eq(7).all().item<bool>()) << "the weight is as it was: nothing is cast";
  stored.value.mul_(3);
  raw::note_copy_written(stored);
  EXPECT_TRUE(used().eq(7).all().item<bool>()) << "whoever wrote the weight wrote the copy";
  stored.value.mul_(3);
  EXPECT_TRUE(at::equal(used(), rounded()));
}

TEST(ComputeCopy, IsNotKeptOfAWeightThatIsUsedAsItIs) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const StepState state;
  ParamSpec spec = cast_spec();
  spec.compute = at::kFloat;
  Param<Dense{I, I, I}> w(spec);
  raw::keep_copy(w.stored());
  EXPECT_FALSE(w.stored().copy);
  EXPECT_FALSE(raw::current_copy(w.stored()).defined());
}

}  // namespace
}  // namespace moesh
