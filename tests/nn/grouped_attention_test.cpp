// Attention with all that its models add, against the formula written out in plain LibTorch.

#include "moesh/nn/grouped_attention.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/experts.h"
#include "tests/spmd/device.h"

namespace moesh {
namespace {

using enum Place;
using nn::GroupedAttention;
using nn::GroupedAttentionConfig;
using nn::QkNorm;

constexpr std::int64_t kBatch = 2, kLength = 7, kDim = 10, kHeadDim = 4;

GroupedAttentionConfig config_of(GroupedAttentionConfig c) {
  c.dim = kDim, c.num_heads = 4, c.num_kv_heads = 2, c.head_dim = kHeadDim, c.norm_eps = 1e-3;
  return c;
}

struct NamedConfig {
  const char* name;
  GroupedAttentionConfig config;
  std::vector<std::string> parameters;
};

std::vector<NamedConfig> all_configs() {
  const nn::RopeConfig rope{.dim = kHeadDim, .theta = 100};
  nn::RopeConfig interleaved = rope;
  interleaved.interleaved = true;
  const std::vector<std::string> plain{"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                       "o_proj.weight"};
  const std::vector<std::string> with_norms{"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                            "q_norm.weight", "k_norm.weight", "o_proj.weight"};
  nn::RopeConfig half = rope;
  half.dim = kHeadDim / 2;
  return {
      {"Mixtral", config_of({.rope = rope}), plain},
      {"OLMoE", config_of({.qk_norm = QkNorm::across, .rope = rope, .clip = 0.7}), with_norms},
      {"MiniMax-M2", config_of({.qk_norm = QkNorm::across, .rope = half}), with_norms},
      {"GLM-4.5",
       config_of({.biases = true, .qk_norm = QkNorm::weighted, .rope = half}),
       {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight",
        "v_proj.bias", "q_norm.weight", "k_norm.weight", "o_proj.weight"}},
      {"Granite", config_of({.rope = rope, .scale = 0.3}), plain},
      {"Qwen3", config_of({.qk_norm = QkNorm::weighted, .rope = rope}), with_norms},
      {"Qwen3-Next",
       config_of({.qk_norm = QkNorm::weighted,
                  .norm_weight = nn::NormWeight::zero_centred,
                  .rope = half,
                  .output_gate = true}),
       with_norms},
      {"Llama 4", config_of({.qk_norm = QkNorm::plain, .rope = interleaved, .chunk = 3}), plain},
      {"Llama 4 without positions", config_of({.growth = 0.1, .growth_floor = 2}), plain},
      {"queries that grow by 1", config_of({.rope = rope, .growth = 1, .growth_floor = 3}), plain},
      {"GPT-OSS",
       config_of({.biases = true, .output_bias = true, .rope = rope, .window = 3, .sinks = true}),
       {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight",
        "v_proj.bias", "sinks", "o_proj.weight", "o_proj.bias"}},
  };
}

GroupedAttention make(const GroupedAttentionConfig& c) {
  GroupedAttention attention(
      c, "a",
      {.dtype = at::kDouble,
       .device = test_device(),
       .init = {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 3}});
  const at::NoGradGuard no_grad;
  attention.each_param([](Stored& w) {  // norms begin with ones, which show little
    if (w.spec.name.find("_norm") != std::string::npos)
      w.value.copy_((at::arange(w.spec.shape[0], at::kDouble) * 0.3 + 0.5)
                        .narrow(0, w.shard.start[0], w.shard.length[0]));
  });
  return attention;
}

using Weights = std::map<std::string, at::Tensor>;

at::Tensor turned(const at::Tensor& x_BLhd, const nn::RopeConfig& rope) {
  const auto half = rope.dim / 2;
  const at::Tensor first = x_BLhd.narrow(-1, 0, rope.dim),
                   rest = x_BLhd.narrow(-1, rope.dim, x_BLhd.size(-1) - rope.dim);
  const at::Tensor pairs = rope.interleaved ? first.unflatten(-1, {half, 2})
                                            : first.unflatten(-1, {2, half}).transpose(-1, -2);
  const at::Tensor angles =
      at::outer(at::arange(kLength, at::kDouble),
                at::pow(rope.theta, at::arange(half, at::kDouble) * (-2.0 / rope.dim)))
          .unsqueeze(1);
  const at::Tensor y = at::view_as_real(at::view_as_complex(pairs.contiguous()) *
                                        at::polar(at::ones_like(angles), angles));
  return at::cat({y.select(-1, 0), y.select(-1, 1), rest}, -1);
}

at::Tensor formula(const GroupedAttentionConfig& c, const Weights& w, const at::Tensor& x_BLD) {
  const auto product = [&](const at::Tensor& x, const std::string& name) {
    const at::Tensor y = x.matmul(w.at(name + ".weight").t());
    return w.contains(name + ".bias") ? y + w.at(name + ".bias") : y;
  };
  const auto normal = [&](const at::Tensor& t) {
    return t / (t.square().mean(-1, true) + c.norm_eps).sqrt();
  };
  const auto heads = [&](const std::string& name) {
    at::Tensor t = product(x_BLD, name + "_proj");
    if (c.qk_norm == QkNorm::across && name != "v") t = normal(t) * w.at(name + "_norm.weight");
    if (c.clip > 0) t = t.clamp(-c.clip, c.clip);
    t = t.unflatten(-1, {-1, c.output_gate && name == "q" ? 2 * c.head_dim : c.head_dim})
            .narrow(-1, 0, c.head_dim);
    if (c.qk_norm == QkNorm::weighted && name != "v")
      t = normal(t) *
          (w.at(name + "_norm.weight") + (c.norm_weight == nn::NormWeight::zero_centred ? 1 : 0));
    if (c.rope && name != "v") t = turned(t, *c.rope);
    if (c.qk_norm == QkNorm::plain && name != "v") t = normal(t);
    return t;
  };
  const at::Tensor position = at::arange(kLength, at::kDouble);
  at::Tensor q = heads("q");
  q = q * (1 + c.growth * ((position + 1) / c.growth_floor).floor().log1p()).reshape({-1, 1, 1});
  const auto per_group = c.num_heads / c.num_kv_heads;
  const at::Tensor k = heads("k").repeat_interleave(per_group, 2),
                   v = heads("v").repeat_interleave(per_group, 2);
  at::Tensor scores = at::einsum("bihd,bjhd->bhij", {q, k}) *
                      c.scale.value_or(1 / std::sqrt(static_cast<double>(c.head_dim)));
  const at::Tensor i = position.unsqueeze(1), j = position;
  at::Tensor hidden = j > i;
  if (c.window > 0) hidden = hidden.logical_or(i - j >= c.window);
  if (c.chunk > 0) hidden = hidden.logical_or((i / c.chunk).floor() != (j / c.chunk).floor());
  scores = scores.masked_fill(hidden, -INFINITY);
  if (c.sinks)
    scores = at::cat(
        {scores, w.at("sinks").reshape({1, -1, 1, 1}).expand({x_BLD.size(0), -1, kLength, 1})}, -1);
  const at::Tensor p = scores.softmax(-1).narrow(-1, 0, kLength);
  at::Tensor y = at::einsum("bhij,bjhd->bihd", {p, v});
  if (c.output_gate)
    y = y * product(x_BLD, "q_proj").unflatten(-1, {-1, 2, c.head_dim}).select(-2, 1).sigmoid();
  return product(y.flatten(2, 3), "o_proj");
}

at::Tensor input() {
  at::manual_seed(7);
  return at::randn({kBatch, kLength, kDim}, at::kDouble);
}

bool close(const at::Tensor& a, const at::Tensor& b) {
  return at::allclose(a.cpu(), b.cpu(), 1e-9, 1e-11);
}

TEST(GroupedAttention, IsTheFormulaWithItsGradients) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const nn::Tokens tokens(mesh, kBatch, kLength, true);
  for (const auto& [name, c, parameters] : all_configs()) {
    SCOPED_TRACE(name);
    GroupedAttention attention = make(c);
    Weights leaf;
    std::vector<std::string> names;
    attention.each_param([&](Stored& w) {
      names.push_back(w.spec.name.substr(2));  // without "a."
      leaf[names.back()] = w.value.detach().cpu().clone().requires_grad_(true);
    });
    EXPECT_EQ(names, parameters);
    const auto x = as_leaf(assume<Dense{T, T, R}>(input().to(test_device())));
    const auto y = attention(x, tokens);
    const at::Tensor x_leaf = input().requires_grad_(true), expected = formula(c, leaf, x_leaf);
    EXPECT_TRUE(close(local(y).detach(), expected.detach()));
    const at::Tensor weights =
        at::arange(expected.numel(), at::kDouble).reshape(expected.sizes()).sin();
    (local(y) * weights.to(test_device())).sum().backward();
    (expected * weights).sum().backward();
    EXPECT_TRUE(close(local(x).grad(), x_leaf.grad()));
    attention.each_param([&](Stored& w) {
      EXPECT_TRUE(close(w.value.grad(), leaf.at(w.spec.name.substr(2)).grad())) << w.spec.name;
    });
  }
}

TEST(GroupedAttention, IsTheSameOnEveryMesh) {
  const at::Tensor x_BLD = input();
  for (const auto& [name, c, parameters] : all_configs()) {
    at::Tensor whole;
    for (const MeshShape& shape :
         {MeshShape{}, MeshShape{.tp = 2}, MeshShape{.cp = 3}, MeshShape{.cp = 2, .tp = 2}})
      comm::launch(
          shape.num_ranks(),
          [&](comm::Group& world) {
            const Mesh mesh(world, shape);
            const MeshScope scope(mesh);
            const at::NoGradGuard no_grad;
            const nn::Tokens tokens(mesh, kBatch, kLength, true);
            const auto x = assume<Dense{T, T, R}>(tokens.my_span(x_BLD).to(test_device()));
            const at::Tensor y = local(all_reduce<tp>(make(c)(x, tokens))).cpu();
            if (shape.num_ranks() == 1)
              whole = y;
            else
              EXPECT_TRUE(close(y, tokens.my_span(whole))) << name << " on " << shape.describe();
          },
          test_options());
  }
}

// Where all scores are 0, a sink of 8.03 among them leaves n / (n + e^8.03) to n values of 1.
// Rounded to bfloat16 it is 8, and everything 3 % larger.
TEST(GroupedAttention, KeepsSinksInFloat32) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const at::NoGradGuard no_grad;
  GroupedAttention attention(
      {.dim = 2, .num_heads = 1, .num_kv_heads = 1, .head_dim = 2, .sinks = true}, "a",
      {.dtype = at::kBFloat16, .device = test_device()});
  attention.each_param([](Stored& w) {
    const bool is_whole = w.spec.name == "a.v_proj.weight" || w.spec.name == "a.o_proj.weight";
    if (w.spec.name == "a.sinks")
      w.value.fill_(8.03);
    else if (is_whole)
      w.value.copy_(at::eye(2));
    else
      w.value.zero_();
  });
  const auto x = assume<Dense{T, T, R}>(
      at::ones({1, 5, 2}, at::TensorOptions(test_device()).dtype(at::kBFloat16)));
  const at::Tensor y =
      local(attention(x, nn::Tokens(mesh, 1, 5, true))).cpu().to(at::kDouble).select(-1, 0)[0];
  for (std::int64_t i = 0; i < 5; ++i) {
    const double n = static_cast<double>(i) + 1, expected = n / (n + std::exp(8.03));
    EXPECT_NEAR(y[i].item<double>(), expected, 0.01 * expected) << i;
  }
}

TEST(Mlp, IsTheFormulaWithItsGradients) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  nn::Mlp mlp("m", kDim, 6,
              {.dtype = at::kDouble,
               .device = test_device(),
               .init = {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 3}});
  std::vector<at::Tensor> leaf;  // gate, up, down
  mlp.each_param([&](auto& w) {
    leaf.push_back(w.stored().value.detach().cpu().clone().requires_grad_(true));
  });
  ASSERT_EQ(leaf.size(), 3u);
  const auto x = as_leaf(assume<Dense{T, T, R}>(input().to(test_device())));
  const at::Tensor x_leaf = input().requires_grad_(true);
  const at::Tensor gate = x_leaf.matmul(leaf[0].t()), up = x_leaf.matmul(leaf[1].t()),
                   expected = (gate * gate.sigmoid() * up).matmul(leaf[2].t());
  const auto y = mlp(x);
  EXPECT_TRUE(close(local(y).detach(), expected.detach()));
  const at::Tensor weights =
      at::arange(expected.numel(), at::kDouble).reshape(expected.sizes()).sin();
  (local(y) * weights.to(test_device())).sum().backward();
  (expected * weights).sum().backward();
  EXPECT_TRUE(close(local(x).grad(), x_leaf.grad()));
  size_t next = 0;
  mlp.each_param([&](auto& w) {
    EXPECT_TRUE(close(w.stored().value.grad(), leaf[next++].grad())) << w.name();
  });
}

// On two ranks of tp as well, which have half of the hidden features each, and all of the gate.
TEST(SharedExperts, AreTheirMlpTimesTheGateWithItsGradients) {
  const std::vector<std::string> names{"m.gate_proj.weight", "m.up_proj.weight",
                                       "m.down_proj.weight", "g.weight"};
  std::vector<at::Tensor> leaf;
  const at::Tensor x_leaf = input().requires_grad_(true);
  const at::Tensor weights = at::arange(x_leaf.numel(), at::kDouble).reshape(x_leaf.sizes()).sin();
  at::Tensor expected;
  for (const int num_ranks : {1, 2})
    comm::launch(
        num_ranks,
        [&](comm::Group& world) {
          const Mesh mesh(world, {.tp = num_ranks});
          const MeshScope scope(mesh);
          nn::SharedExperts shared(
              "m", "g", kDim, 6,
              {.dtype = at::kDouble,
               .device = test_device(),
               .init = {.kind = Init::Distribution::normal, .scale = 0.5, .seed = 3}});
          if (num_ranks == 1) {
            size_t next = 0;
            shared.each_param([&](auto& w) {
              EXPECT_EQ(w.name(), names.at(next++));
              leaf.push_back(w.stored().value.detach().cpu().clone().requires_grad_(true));
            });
            const at::Tensor gate = x_leaf.matmul(leaf.at(0).t()), up = x_leaf.matmul(leaf[1].t());
            expected = (gate * gate.sigmoid() * up).matmul(leaf[2].t()) *
                       x_leaf.matmul(leaf.at(3).t()).sigmoid();
            (expected * weights).sum().backward();
          }
          const auto x = as_leaf(assume<Dense{T, T, I}>(x_leaf.detach().clone().to(test_device())));
          const auto y = all_reduce<tp, I>(shared(enter<tp>(x)));
          EXPECT_TRUE(close(local(y).detach(), expected.detach()));
          (local(y) * weights.to(test_device())).sum().backward();
          EXPECT_TRUE(close(local(x).grad(), x_leaf.grad()));
          size_t next = 0;
          shared.each_param([&](auto& w) {
            const Stored& s = w.stored();
            at::Tensor whole = leaf[next++].grad();
            for (std::int64_t d = 0; d < whole.dim(); ++d)
              whole = whole.narrow(d, s.shard.start[static_cast<size_t>(d)],
                                   s.shard.length[static_cast<size_t>(d)]);
            EXPECT_TRUE(close(s.value.grad(), whole)) << w.name();
          });
        },
        test_options());
}

}  // namespace
}  // namespace moesh
