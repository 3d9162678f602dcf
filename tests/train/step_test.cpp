// One optimizer step of a model: what makes all ranks skip it, and that nothing moves then.

#include "moesh/train/step.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "moesh/base/random.h"
#include "moesh/models/registry.h"
#include "moesh/spmd/spmd.h"
#include "moesh/train/model_setup.h"
#include "tests/spmd/device.h"

namespace moesh::train {
namespace {

models::MicroBatch batch_of(const Mesh& mesh, std::int64_t label = -1) {
  const Random random(4, static_cast<std::uint64_t>(mesh.coordinate(dp)));
  at::Tensor ids = at::empty({2, 8}, at::kLong);
  for (std::int64_t i = 0; i < 16; ++i) ids.data_ptr<std::int64_t>()[i] = static_cast<std::int64_t>(random.below(i, 96));
  ids = ids.to(test_device());
  const at::Tensor labels = label == -1 ? ids.narrow(1, 1, 7) : at::full({2, 7}, label, ids.options());
  return {.input_ids_BL = ids.narrow(1, 0, 7).contiguous(), .labels_BL = labels.contiguous()};
}

// Everything that a step may move.
std::vector<at::Tensor> state_of(models::Model& model, optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  model.each_param([&](Stored& w, bool) { all.push_back(w.value.detach().clone()); });
  for (auto* router : model.routers()) all.push_back(router->expert_bias().clone());
  all.push_back(at::full({}, optimizer.num_steps(), at::kLong));
  return all;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!a[i].equal(b[i])) return false;
  return a.size() == b.size();
}

class Steps : public testing::TestWithParam<MeshShape> {};
INSTANTIATE_TEST_SUITE_P(Meshes, Steps,
                         testing::Values(MeshShape{}, MeshShape{.dp_shard = 2, .tp = 2, .ep = 2},
                                         MeshShape{.dp_replicate = 2, .cp = 2, .ep = 2}, MeshShape{.tp = 4, .ep = 2, .etp = 2}),
                         [](const auto& info) { return "mesh" + std::to_string(info.index); });

// A single infinite number, on the last rank alone.
TEST_P(Steps, AGradientThatIsNotFiniteStopsAllRanks) {
  comm::launch(
      GetParam().num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, GetParam());
        const MeshScope scope(mesh);
        const auto model = models::make_model(models::built_in("deepseek_v3", "tiny"),
                                              {.dtype = at::kDouble, .device = test_device(), .seed = 1});
        const auto optimizer = make_optimizer(*model, {});
        const StepOptions options{.bias_coeff = 0.01};

        // A step that counts, so that there is state to lose.
        const Update first =
            apply_gradients(*model, *optimizer, accumulate_gradients(*model, {batch_of(mesh)}, options), 1e-3, options);
        ASSERT_FALSE(first.skipped);
        const auto before = state_of(*model, *optimizer);

        const Gradients g = accumulate_gradients(*model, {batch_of(mesh)}, options);
        if (world.rank() == world.size() - 1) {
          at::Tensor some;
          model->each_param([&](Stored& w, bool) {
            if (w.spec.name.find("experts.w2") != std::string::npos && w.value.numel() > 0) some = w.value.grad();
          });
          ASSERT_TRUE(some.defined());
          some.view(-1)[0] = std::numeric_limits<double>::infinity();
        }
        const Update update = apply_gradients(*model, *optimizer, g, 1e-3, options);
        EXPECT_TRUE(update.skipped) << "rank " << world.rank();
        EXPECT_TRUE(same(before, state_of(*model, *optimizer))) << "rank " << world.rank();

        // The next step is as if the bad one had not been: gradients and counts are gone.
        const Gradients again = accumulate_gradients(*model, {batch_of(mesh)}, options);
        EXPECT_EQ(again.loss, g.loss);
        const Update next = apply_gradients(*model, *optimizer, again, 1e-3, options);
        EXPECT_FALSE(next.skipped);
        EXPECT_FALSE(same(before, state_of(*model, *optimizer)));
        for (const auto& t : state_of(*model, *optimizer)) EXPECT_TRUE(t.to(at::kDouble).isfinite().all().item<bool>());
      },
      test_options());
}

TEST_P(Steps, WithoutAValidTokenNothingMoves) {
  comm::launch(
      GetParam().num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, GetParam());
        const MeshScope scope(mesh);
        const auto model = models::make_model(models::built_in("deepseek_v3", "tiny"),
                                              {.dtype = at::kDouble, .device = test_device(), .seed = 1});
        const auto optimizer = make_optimizer(*model, {});
        const StepOptions options{.bias_coeff = 0.01};
        const auto before = state_of(*model, *optimizer);
        const Gradients g = accumulate_gradients(*model, {batch_of(mesh, -100)}, options);
        EXPECT_EQ(g.loss, 0);
        EXPECT_EQ(g.num_tokens, 0);
        EXPECT_TRUE(apply_gradients(*model, *optimizer, g, 1e-3, options).skipped);
        EXPECT_TRUE(same(before, state_of(*model, *optimizer)));
      },
      test_options());
}

}  // namespace
}  // namespace moesh::train
