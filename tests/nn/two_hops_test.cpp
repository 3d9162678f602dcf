// What ranks send to other nodes and inside their own, counted, on 16 ranks of 4 nodes: the table
// of docs/performance.md, "Dispatchers".

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <mutex>

#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"
#include "moesh/nn/moe.h"
#include "moesh/spmd/spmd.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;

constexpr MeshShape kSixteen{.dp_shard = 16, .ep = 16, .ranks_per_node = 4};
constexpr std::int64_t kExperts = 64, kDim = 2048, kTokens = 48;  // of each rank
constexpr double kRowBytes = 2 * kDim;                            // bfloat16

// Sums up what this rank sends over the ranks of ep.
class CountedByNode final : public comm::ThreadObserver {
 public:
  void called(const comm::Operation& o) override {
    if (!o.group.name().starts_with("ep")) return;
    const comm::SentParts p = comm::sent_parts(o, kSixteen.ranks_per_node);
    inside += static_cast<double>(p.inside), between += static_cast<double>(p.between);
  }
  double inside = 0, between = 0;
};

// Forward and backward of a layer on all ranks, in rows of D numbers for each token, each way.
struct Counted {
  double inside = 0, between = 0;
  double nodes = 0;   // of a token's experts, on average
  at::Tensor y_16ND;  // of all ranks
};

Counted count(nn::Dispatcher dispatcher, nn::RouterConfig router, std::int64_t float8_tile = 0) {
  router.num_experts = kExperts, router.normalize = true;
  Counted sum;
  std::vector<at::Tensor> outputs(16);
  std::mutex mutex;
  auto options = test_options();
  options.num_threads = 1;
  comm::launch(
      16,
      [&](comm::Group& world) {
        const Mesh mesh(world, kSixteen);
        const MeshScope scope(mesh);
        nn::Moe moe({.router = router,
                     .experts = {.num_experts = kExperts, .dim = kDim, .ffn = 4},
                     .dispatcher = dispatcher},
                    {.dtype = at::kBFloat16,
                     .device = test_device(),
                     .init = {.kind = Init::Distribution::normal, .scale = 0.1, .seed = 4},
                     .float8 = {.rows = float8_tile}});
        const nn::Tokens tokens(mesh, 1, kTokens, true);
        const at::Tensor ids = at::arange(kTokens * kDim, at::kDouble) +
                               static_cast<double>(world.rank() * kTokens * kDim);
        const at::Tensor x = (ids * ids * 1e-3 + ids).sin().reshape({1, kTokens, kDim});
        const auto input = as_leaf(assume<Dense{T, T, T}>(x.to(test_device(), at::kBFloat16)));
        CountedByNode counted;
        const auto out = moe(input, tokens);
        local(out.y).sum().backward();
        const at::Tensor node_NK = local(out.route.experts_NK).cpu().div(kExperts / 4, "floor");
        const at::Tensor is_on_Nn = at::zeros({kTokens, 4}, at::kDouble).scatter(1, node_NK, 1.0);
        const std::lock_guard lock(mutex);
        outputs[static_cast<size_t>(world.rank())] = local(out.y).detach().cpu().to(at::kFloat);
        // There and back, forward and backward.
        constexpr double kAll = 16 * kTokens * 4 * kRowBytes;
        sum.inside += counted.inside / kAll, sum.between += counted.between / kAll;
        sum.nodes += is_on_Nn.sum().item<double>() / (16 * kTokens);
      },
      options);
  sum.y_16ND = at::cat(outputs, 0);
  return sum;
}

TEST(Nodes, TwoHopsSendATokenOnceToANodeAndTheOthersDoNot) {
  struct Row {
    const char* name;
    nn::RouterConfig router;
  };
  std::printf("%-42s %-11s %9s %9s\n", "rows of a token, one way", "", "between", "inside");
  for (const auto& [name, router] :
       {Row{"K 2", {.top_k = 2}}, Row{"K 8", {.top_k = 8}},
        Row{"K 8, 4 of 8 groups, two on a node", {.top_k = 8, .num_groups = 8, .top_groups = 4}},
        Row{"K 8, 2 of 4 groups, one on a node", {.top_k = 8, .num_groups = 4, .top_groups = 2}}}) {
    std::map<nn::Dispatcher, Counted> all;
    for (const auto d :
         {nn::Dispatcher::all_to_all, nn::Dispatcher::all_gather, nn::Dispatcher::two_hops}) {
      all[d] = count(d, router);
      std::printf("%-42s %-11s %9.2f %9.2f\n", name, nn::to_string(d), all[d].between,
                  all[d].inside);
    }
    const Counted &hops = all[nn::Dispatcher::two_hops], &rows = all[nn::Dispatcher::all_to_all];
    const double k = static_cast<double>(router.top_k);
    // Messages also have scores and numbers of experts, up to 16 bytes a choice each way.
    const double extra = 16 * k / kRowBytes;
    EXPECT_GE(hops.between, 0.7 * hops.nodes);
    EXPECT_LE(hops.between, 0.8 * hops.nodes * (1 + extra)) << "of 4 nodes, 3 are others";
    EXPECT_GE(rows.between, 0.7 * k) << "a row for each of a token's experts";
    EXPECT_LT(hops.between, rows.between);
    nn::RouterConfig asked = router;
    asked.num_experts = kExperts;
    EXPECT_NEAR(nn::mean_nodes(asked, 4), hops.nodes, 0.1 * hops.nodes) << "what estimates assume";
    const at::Tensor error = (hops.y_16ND - rows.y_16ND).norm() / rows.y_16ND.norm();
    EXPECT_LT(error.item<double>(), 2e-2);
  }
}

// Rows and gradients go to experts in a byte a number, and one for each tile; outputs and gradients
// of rows come home as they are.
TEST(Nodes, RowsInFloat8TakeHalfTheBytesOnTheWayToExperts) {
  const nn::RouterConfig router{.top_k = 8};
  for (const auto d :
       {nn::Dispatcher::all_to_all, nn::Dispatcher::all_gather, nn::Dispatcher::two_hops}) {
    const Counted plain = count(d, router), coded = count(d, router, 128);
    const double there = (kDim + kDim / 128.0) / kRowBytes, wanted = (there + 1) / 2;
    // Scores and numbers travel as before. Gathers and sums of all_gather are not divided alike.
    EXPECT_NEAR((coded.between + coded.inside) / (plain.between + plain.inside), wanted, 0.01)
        << nn::to_string(d);
    const at::Tensor error = (coded.y_16ND - plain.y_16ND).norm() / plain.y_16ND.norm();
    EXPECT_GT(error.item<double>(), 1e-3) << nn::to_string(d);
    EXPECT_LT(error.item<double>(), 0.1) << nn::to_string(d);
  }
}

}  // namespace
}  // namespace moesh
