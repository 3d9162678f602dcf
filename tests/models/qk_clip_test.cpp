#include "moesh/nn/qk_clip.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "moesh/models/registry.h"

namespace moesh {
namespace {

struct Largest {
  at::Tensor before, after;  // [heads], of the first layer: what goes into it stays
};

// The largest logits of the same tokens, before and after a clip at tau.
Largest around_clip(const models::AnyConfig& config, std::int64_t num_heads, const MeshShape& shape,
                    double tau, bool skip = false) {
  at::manual_seed(5);
  const at::Tensor ids = at::randint(90, {4, 9});
  Largest largest{at::zeros({num_heads}, at::kDouble), at::zeros({num_heads}, at::kDouble)};
  comm::launch(shape.num_ranks(), [&](comm::Group& world) {
    const Mesh mesh(world, shape);
    const MeshScope scope(mesh);
    const at::NoGradGuard no_grad;
    const auto model = models::make_model(config, {.dtype = at::kDouble});
    const auto count = ids.size(0) / mesh.size(dp);
    const at::Tensor mine = ids.narrow(0, count * mesh.coordinate(dp), count);
    const auto look = [&](at::Tensor& to) {
      model->forward({.input_ids_BL = mine, .labels_BL = mine}, {.watches_logits = true});
      at::Tensor found = model->attentions()[0]->max_logits().largest_h();
      for (const Axes axis : {dp, cp})
        found = mesh.group(axis)->all_reduce(found, comm::ReduceOp::max);
      to.narrow(0, found.size(0) * mesh.coordinate(tp), found.size(0)).copy_(found);
    };
    look(largest.before);
    nn::clip_logits(model->attentions(), tau, at::full({}, skip ? 1.0 : 0.0, at::kDouble));
    look(largest.after);
  });
  return largest;
}

TEST(Clip, BringsTheLargestLogitOfAHeadToTau) {
  for (const std::string name : {"deepseek_v3", "mixtral", "gpt_oss"})
    for (const bool is_grouped : {false, true}) {
      models::AnyConfig config = models::built_in(name, "tiny");
      const std::int64_t heads = std::visit(
          [&](auto& m) {
            if constexpr (requires { m.num_kv_heads; })
              m.num_kv_heads = is_grouped ? m.num_heads / 2 : m.num_heads;
            return m.num_heads;
          },
          config);
      const at::Tensor free = around_clip(config, heads, {}, 1e9).before;
      const double tau = free.median().item<double>();
      ASSERT_GT(tau, 0) << name;
      for (const MeshShape& shape : {MeshShape{}, MeshShape{.dp_shard = 2, .cp = 2},
                                     MeshShape{.dp_replicate = 2, .tp = 2}}) {
        const Largest found = around_clip(config, heads, shape, tau);
        EXPECT_TRUE(at::allclose(found.before, free, 1e-10, 0)) << name << shape.describe();
        EXPECT_TRUE(at::allclose(found.after, free.clamp_max(tau), 1e-10, 0))
            << name << " on " << shape.describe() << ": " << free << found.after;
        EXPECT_TRUE(
            at::equal(around_clip(config, heads, shape, tau, /*skip=*/true).after, found.before))
            << "a step that is skipped moves nothing";
      }
    }
}

}  // namespace
}  // namespace moesh
