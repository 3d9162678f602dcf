// What is expensive is computed once: a recompute that keeps has the gradients of none, bit by bit.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "moesh/fsdp/fsdp.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/nn/attention_functions.h"
#include "moesh/nn/experts.h"

namespace moesh::nn {
namespace {

using enum Place;
using Inputs = std::vector<at::Tensor>;

// Gradients of all inputs of f, which gets the first as the input of the recompute.
Inputs gradients(const Inputs& values, const std::function<at::Tensor(const Inputs&)>& f,
                 std::optional<Keep> keep) {
  Inputs leaves;
  for (const auto& v : values) leaves.push_back(v.detach().clone().requires_grad_(true));
  const auto run = [&](const at::Tensor& x, bool) {
    Inputs all = leaves;
    all[0] = x;
    return Inputs{f(all)};
  };
  const at::Tensor y = keep ? raw::recompute(run, leaves[0], *keep)[0] : run(leaves[0], false)[0];
  const at::Tensor weights = at::arange(y.numel(), y.options()).reshape(y.sizes()).sin();
  y.backward(weights);
  Inputs found;
  for (const auto& leaf : leaves) found.push_back(leaf.grad());
  return found;
}

void expect_the_gradients_of_none(const Inputs& values,
                                  const std::function<at::Tensor(const Inputs&)>& f) {
  const Inputs expected = gradients(values, f, {});
  for (const Keep keep : {Keep::nothing, Keep::expensive}) {
    const Inputs found = gradients(values, f, keep);
    for (std::size_t i = 0; i < values.size(); ++i)
      EXPECT_TRUE(at::equal(found[i], expected[i])) << "input " << i;
  }
}

TEST(Selective, ADenseMlpHasTheGradientsOfNone) {
  at::manual_seed(1);
  // Narrower than it is wide, so that no size stands for another.
  expect_the_gradients_of_none(
      {at::randn({2, 3, 7}, at::kDouble), at::randn({2, 3, 7}, at::kDouble),
       at::randn({4, 7}, at::kDouble)},
      [](const Inputs& x) { return swiglu_linear(x[0], x[1], x[2]).first; });
}

TEST(Selective, AttentionHasTheGradientsOfNone) {
  at::manual_seed(2);
  expect_the_gradients_of_none(
      {at::randn({2, 6, 4, 8}, at::kDouble), at::randn({2, 6, 2, 8}, at::kDouble),
       at::randn({2, 6, 2, 5}, at::kDouble)},
      [](const Inputs& x) {
        return fused_attention({.scale = 0.4, .window = 3}, {x[0], x[1], x[2]});
      });
}

TEST(Selective, ExpertsHaveTheGradientsOfNone) {
  at::manual_seed(3);
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const at::Tensor chosen = at::arange(10).mul(3).remainder(4).reshape({5, 2});
  for (const bool biases : {false, true}) {
    Experts experts({.num_experts = 4, .dim = 6, .ffn = 3, .biases = biases}, "experts",
                    {.dtype = at::kDouble,
                     .init = {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 5}});
    const auto run = [&](const Inputs& x) {
      return local(experts.apply_to_tokens(assume<Sparse{T, R, R}>(x[0]),
                                           assume<Sparse{T, R, R}>(x[1]), chosen));
    };
    std::vector<Inputs> of_weights;
    for (const std::optional<Keep> keep :
         {std::optional<Keep>(), std::optional(Keep::nothing), std::optional(Keep::expensive)}) {
      at::manual_seed(4);
      Inputs found =
          gradients({at::randn({5, 6}, at::kDouble), at::randn({5, 2}, at::kDouble)}, run, keep);
      experts.each_param([&](auto& w) {
        found.push_back(w.stored().value.grad().clone());
        w.stored().value.mutable_grad().reset();
      });
      of_weights.push_back(found);
    }
    for (std::size_t i = 0; i < of_weights[0].size(); ++i)
      for (const auto& found : of_weights)
        EXPECT_TRUE(at::equal(found[i], of_weights[0][i])) << "gradient " << i;
  }
}

// On meta, as estimate counts: of grouped heads d(k) and d(v) of every query head are there before
// they are summed, and a recompute that keeps holds the result.
TEST(Selective, CausalAttentionCountsWhatBackwardHolds) {
  constexpr std::int64_t kBatch = 2, kLength = 24, kHeads = 6, kWidth = 16;
  const auto beside_gradients = [](std::int64_t groups) {
    const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
    const auto leaf = [](std::int64_t heads) {
      return at::empty({kBatch, kLength, heads, kWidth},
                       at::TensorOptions(at::kMeta).dtype(at::kBFloat16))
          .requires_grad_(true);
    };
    const at::Tensor q = leaf(kHeads), k = leaf(groups), v = leaf(groups);
    const at::Tensor y = composed_attention({.scale = 1}, {q, k, v});
    EXPECT_EQ(y.sizes(), q.sizes());
    const at::Tensor dy = at::empty_like(y);
    const std::int64_t before = memory.live();
    y.backward(dy);
    for (const at::Tensor& x : {q, k, v}) {
      EXPECT_TRUE(x.grad().defined());
      EXPECT_EQ(x.grad().sizes(), x.sizes());
    }
    return memory.peak() - before -
           2 * kBatch * kLength * kWidth * (kHeads + 2 * groups);  // the gradients in bfloat16
  };
  EXPECT_EQ(beside_gradients(2) - beside_gradients(kHeads),
            2 * 2 * kBatch * kLength * kWidth * kHeads);
}

TEST(Selective, CausalAttentionIsKept) {
  const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
  const at::Tensor x = at::empty({2, 24, 4, 16}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16))
                           .requires_grad_(true);
  const auto y = raw::recompute(
      [](const at::Tensor& q, bool) { return Inputs{composed_attention({.scale = 1}, {q, q, q})}; },
      x, Keep::expensive)[0];
  y.backward(at::empty_like(y));
  EXPECT_EQ(x.grad().sizes(), x.sizes());
}

}  // namespace
}  // namespace moesh::nn
