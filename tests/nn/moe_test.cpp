#include "moesh/nn/moe.h"

#include <gtest/gtest.h>

#include "moesh/train/layer_parity.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using train::LayerCase;

LayerCase small_case() {
  LayerCase c;
  c.layer.router = {.num_experts = 8, .top_k = 3, .normalize = true};
  c.layer.experts = {.num_experts = 8, .dim = 6, .ffn = 5};
  c.layer.dtype = at::kDouble;
  c.layer.device = test_device();
  c.layer.init = {.kind = Init::Kind::normal, .scale = 0.5, .seed = 3};
  return c;
}

void expect_parity(const LayerCase& c, const MeshShape& shape) {
  const auto reference = train::run_reference(c, shape.dp_replicate * shape.dp_shard);
  const auto report = train::compare_layer({c}, {&reference}, shape, test_options())[0];
  EXPECT_TRUE(report.holds()) << report.describe(c, shape);
}

TEST(MoeParity, OnAFewMeshes) {
  for (bool sp : {true, false})
    for (auto dispatcher : {nn::Dispatcher::all_to_all, nn::Dispatcher::all_gather})
      for (std::int64_t shared : {0, 4})
        for (const auto& shape : {MeshShape{.tp = 2}, MeshShape{.tp = 2, .ep = 2}, MeshShape{.tp = 2, .etp = 2}, MeshShape{.dp_shard = 2, .ep = 2},
                                  MeshShape{.dp_shard = 2, .cp = 2, .tp = 2, .ep = 2, .etp = 2}}) {
          LayerCase c = small_case();
          c.batch = 2, c.sequence = 7;
          c.sequence_parallel = sp;
          c.layer.dispatcher = dispatcher;
          c.layer.shared_ffn = shared;
          c.switch_weight = 0.1, c.sequence_weight = 0.2, c.z_weight = 0.3;
          expect_parity(c, shape);
        }
}

}  // namespace
}  // namespace moesh
