#include "moesh/verify/parity.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/router.h"

namespace moesh::verify {
namespace {

using enum Place;

nn::Route route_of(nn::Router& router, const at::Tensor& x_ND, const Mesh& mesh,
                   const nn::RouteOptions& options) {
  const nn::Tokens tokens(mesh, 1, x_ND.size(0), true);
  return router.choose(assume<Dense{T, T, T}>(x_ND), tokens, options);
}

TEST(Replay, GivesBackTheRecordedChoiceAndCountsFlips) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  nn::Router router(
      {.num_experts = 6, .top_k = 2}, "gate", 6,
      {.dtype = at::kDouble, .init = {.kind = Init::Distribution::normal, .seed = 4}});
  const at::Tensor x = at::randn({20, 6}, at::kDouble);
  RoutingRecord record(1, 40, 2);
  const at::Tensor experts_TK = record.experts_LTK[0];
  VerifyProbe probe;
  probe.record = &record;
  // The second micro-batch stands behind the first.
  const nn::Route first = route_of(router, x, mesh, {.probe = &probe, .micro_batch = 1});
  EXPECT_TRUE(at::equal(experts_TK.narrow(0, 20, 20), local(first.experts_NK)));
  EXPECT_TRUE(experts_TK.narrow(0, 0, 20).eq(-1).all().item<bool>());
  route_of(router, -x, mesh, {.pass = nn::Pass::recompute, .probe = &probe, .micro_batch = 1});
  EXPECT_TRUE(at::equal(experts_TK.narrow(0, 20, 20), local(first.experts_NK)))
      << "a recompute records nothing";

  probe.record = nullptr, probe.replay_from(&record);
  const nn::Route same = route_of(router, x, mesh, {.probe = &probe, .micro_batch = 1});
  EXPECT_EQ(record.num_flipped, 0);
  EXPECT_TRUE(at::equal(local(same.experts_NK), local(first.experts_NK)));
  const nn::Route other = route_of(router, -x, mesh, {.probe = &probe, .micro_batch = 1});
  EXPECT_TRUE(at::equal(local(other.experts_NK), local(first.experts_NK)))
      << "the choice is replayed";
  EXPECT_TRUE(at::allclose(local(other.weights_NK),
                           at::sigmoid(local(other.logits_NE)).gather(1, local(first.experts_NK))))
      << "the weights are not";
  EXPECT_GT(record.num_flipped, 0);
  EXPECT_GT(record.largest_margin, 0);
  const std::int64_t flipped = record.num_flipped;
  route_of(router, -x, mesh, {.pass = nn::Pass::recompute, .probe = &probe, .micro_batch = 1});
  EXPECT_EQ(record.num_flipped, flipped) << "a recompute counts nothing twice";
}

TEST(Capture, KeepsTheInputWithItsGradientAndTheLogits) {
  VerifyProbe probe;
  const at::Tensor leaf = at::ones({3}, at::kDouble).requires_grad_(true);
  const at::Tensor x = leaf * 2, y = x * 3;
  probe.on_input(x), probe.on_logits(y);
  y.sum().backward();
  ASSERT_EQ(probe.inputs.size(), 1u);
  ASSERT_EQ(probe.logits_BLV.size(), 1u);
  EXPECT_TRUE(at::equal(probe.inputs[0].grad(), at::full({3}, 3.0, at::kDouble)));
  EXPECT_FALSE(probe.logits_BLV[0].requires_grad());
  EXPECT_TRUE(at::equal(probe.logits_BLV[0], y.detach()));
  probe.on_input(y), probe.on_logits(x);
  EXPECT_TRUE(at::equal(probe.logits_BLV[1], x.detach())) << "of the next micro-batch";
  probe.begin_step();
  EXPECT_TRUE(probe.inputs.empty() && probe.logits_BLV.empty());
}

// Near ties flip in a balance loss as well: what it counts is replayed, and is not the routing.
TEST(Replay, GivesBackWhatTheBalanceLossCounts) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  nn::Router router(
      {.num_experts = 6, .top_k = 2}, "gate", 6,
      {.dtype = at::kDouble, .init = {.kind = Init::Distribution::normal, .seed = 4}});
  router.expert_bias().copy_(at::arange(6, at::kDouble));
  const at::Tensor x = at::randn({20, 6}, at::kDouble), count = at::full({}, 20, at::kDouble);
  RoutingRecord record(1, 20, 2);
  VerifyProbe probe;
  const nn::RouteOptions options{.probe = &probe};
  const auto loss = [&](const at::Tensor& input) {
    const nn::Route route = route_of(router, input, mesh, options);
    return local(nn::balance_loss(route, router.config(), {mesh, 1, 20, true}, count,
                                  nn::BalanceOver::sequence, options))
        .item<double>();
  };
  const double plain = loss(x);
  probe.record = &record;
  EXPECT_EQ(loss(x), plain);
  EXPECT_FALSE(at::equal(record.for_balance_LTK, record.experts_LTK));
  probe.record = nullptr, probe.replay_from(&record);
  EXPECT_EQ(loss(x), plain);
  record.for_balance_LTK.copy_(record.experts_LTK);
  EXPECT_NE(loss(x), plain);
}

}  // namespace
}  // namespace moesh::verify
