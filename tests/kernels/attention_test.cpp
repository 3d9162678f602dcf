// The kernel against the formula, written with LibTorch's matmul and softmax in float64, and its
// autograd.

#include "moesh/kernels/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "moesh/base/error.h"
#include "support.h"

namespace moesh::kernels {
namespace {

struct Shape {
  std::int64_t batch, queries, keys, heads, key_heads, d, v;
  AttentionConfig config;
  bool sinks = false;
};

// Every kind of block: one query, a part of a panel, several panels, an odd width, grouped heads,
// queries in the middle.
std::vector<Shape> shapes() {
  return {
      {1, 1, 1, 1, 1, 4, 4, {.scale = 0.5}},
      {2, 7, 7, 4, 4, 12, 8, {.scale = 0.3}},
      {2, 65, 65, 2, 1, 16, 24, {.scale = 0.2}},
      {1, 130, 130, 4, 2, 192, 128, {.scale = 0.07}},
      {2, 9, 31, 6, 3, 5, 3, {.scale = 0.4, .start = 20}},
      {1, 70, 200, 2, 2, 33, 65, {.scale = 0.2, .start = 130}},
      {2, 150, 150, 2, 2, 8, 8, {.scale = 0.5, .window = 20}},
      {1, 150, 150, 2, 1, 8, 8, {.scale = 0.5, .chunk = 48}},
      {1, 40, 150, 2, 1, 8, 8, {.scale = 0.5, .start = 100, .window = 1}},
      {2, 150, 150, 4, 2, 16, 16, {.scale = 0.25, .window = 100}, true},
      {3, 17, 40, 2, 2, 16, 16, {.scale = 0.25, .start = 5}, true},
      {2, 0, 5, 2, 2, 8, 8, {.scale = 1}},
      {0, 5, 5, 2, 2, 8, 8, {.scale = 1}},
  };
}

at::Tensor formula(const Shape& s, const AttentionInput& in) {
  const auto per_key = s.heads / s.key_heads;
  const at::Tensor q = in.q_BLhd.transpose(1, 2),
                   k = in.k_BSgd.transpose(1, 2).repeat_interleave(per_key, 1),
                   v = in.v_BSgv.transpose(1, 2).repeat_interleave(per_key, 1);
  const at::Tensor position = at::arange(s.config.start, s.config.start + s.queries).unsqueeze(1),
                   key = at::arange(s.keys);
  at::Tensor hidden = key > position;
  if (s.config.window) hidden = hidden.logical_or(key <= position - s.config.window);
  if (s.config.chunk)
    hidden = hidden.logical_or(key < position.div(s.config.chunk, "floor") * s.config.chunk);
  at::Tensor scores = (q.matmul(k.transpose(2, 3)) * s.config.scale).masked_fill(hidden, -INFINITY);
  if (s.sinks)
    scores = at::cat(
        {scores, in.sinks_h.reshape({1, s.heads, 1, 1}).expand({s.batch, s.heads, s.queries, 1})},
        3);
  return scores.softmax(3).narrow(3, 0, s.keys).matmul(v).transpose(1, 2);
}

class Attention : public testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, Attention, testing::Values(at::kDouble, at::kFloat, at::kBFloat16),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(Attention, IsTheFormulaForwardAndBackward) {
  const auto dtype = GetParam();
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const double tolerance = dtype == at::kDouble ? 1e-12 : dtype == at::kFloat ? 2e-6 : 1e-2;
  at::manual_seed(7);
  int number = 0;
  for (const Shape& s : shapes()) {
    const std::string what = "shape " + std::to_string(number++);
    const auto random = [&](std::vector<std::int64_t> size) {
      return at::randn(size, at::kDouble).to(dtype);
    };
    // Keys and values as views of one tensor, as in multi-head latent attention.
    const at::Tensor kv = random({s.batch, s.keys, s.key_heads, s.d + s.v});
    AttentionInput in{
        .q_BLhd = random({s.batch, s.queries, s.heads, s.d}),
        .k_BSgd = kv.narrow(3, 0, s.d),
        .v_BSgv = kv.narrow(3, s.d, s.v),
        .sinks_h = s.sinks ? at::randn({s.heads}, at::kDouble).to(wide) : at::Tensor()};
    const at::Tensor dy = random({s.batch, s.queries, s.heads, s.v});
    const auto leaf = [](const at::Tensor& t) {
      return t.to(at::kDouble).clone().requires_grad_(true);
    };
    AttentionInput exact{leaf(in.q_BLhd), leaf(in.k_BSgd), leaf(in.v_BSgv),
                         s.sinks ? leaf(in.sinks_h) : at::Tensor()};
    const at::Tensor want = formula(s, exact);
    torch::autograd::backward({want}, {dy.to(at::kDouble)});

    const Poison poison;
    const AttentionOutput out = attention_forward(s.config, in);
    const AttentionGradients grads = attention_backward(s.config, in, out, dy);
    expect_close(out.y_BLhv, want.detach(), tolerance, what + ": y");
    expect_close(grads.q_BLhd, exact.q_BLhd.grad(), tolerance, what + ": dq");
    expect_close(grads.k_BSgd, exact.k_BSgd.grad(), tolerance, what + ": dk");
    expect_close(grads.v_BSgv, exact.v_BSgv.grad(), tolerance, what + ": dv");
    if (s.sinks)
      expect_close(grads.sinks_h, exact.sinks_h.grad(), 10 * tolerance, what + ": d(sinks)");
  }
}

// Windows as GPT-OSS has them, for which GPUs have a kernel of their own: around blocks of 64, the
// rows of a projection of several, the same bits twice.
TEST(WindowAttention, IsTheFormulaOnEveryDevice) {
  for (const auto& [batch, length, heads, key_heads, window, sinks] :
       {std::tuple{2, 7, 4, 2, 3, true},
        {1, 65, 2, 2, 64, false},
        {2, 130, 4, 2, 128, true},
        {1, 200, 8, 1, 128, false},
        {1, 300, 16, 2, 100, true},
        {3, 129, 3, 3, 1, true}}) {
    at::manual_seed(7);
    const Shape s{
        batch, length, length, heads, key_heads, 64, 64, {.scale = 0.125, .window = window}, sinks};
    const auto random = [&](std::int64_t num) {
      return at::randn({batch, length, num, 64}, at::kDouble).to(at::kBFloat16);
    };
    const at::Tensor together = random(heads + 2 * key_heads), dy = random(heads);
    AttentionInput exact{together.narrow(2, 0, heads), together.narrow(2, heads, key_heads),
                         together.narrow(2, heads + key_heads, key_heads),
                         sinks ? at::randn({heads}, at::kDouble) : at::Tensor()};
    const auto here = [](const at::Tensor& t) { return t.to(test_device()); };
    const at::Tensor moved = here(together);
    const AttentionInput in{moved.narrow(2, 0, heads), moved.narrow(2, heads, key_heads),
                            moved.narrow(2, heads + key_heads, key_heads),
                            sinks ? here(exact.sinks_h).to(at::kFloat) : at::Tensor()};
    const auto leaf = [](const at::Tensor& t) {
      return t.defined() ? t.to(at::kDouble).clone().requires_grad_(true) : t;
    };
    exact = {leaf(exact.q_BLhd), leaf(exact.k_BSgd), leaf(exact.v_BSgv), leaf(exact.sinks_h)};
    const at::Tensor want = formula(s, exact);
    torch::autograd::backward({want}, {dy.to(at::kDouble)});

    const Poison poison;
    ASSERT_TRUE(takes_attention(s.config, in));
    const AttentionOutput out = attention_forward(s.config, in);
    const AttentionGradients grads = attention_backward(s.config, in, out, here(dy)),
                             again = attention_backward(s.config, in, out, here(dy));
    const std::string what = detail::concat(batch, " x ", length, ", window ", window);
    expect_close(out.y_BLhv, want.detach(), 4e-3, what + ": y");
    expect_close(grads.q_BLhd, exact.q_BLhd.grad(), 8e-3, what + ": dq");
    expect_close(grads.k_BSgd, exact.k_BSgd.grad(), 8e-3, what + ": dk");
    expect_close(grads.v_BSgv, exact.v_BSgv.grad(), 8e-3, what + ": dv");
    if (sinks) expect_close(grads.sinks_h, exact.sinks_h.grad(), 2e-2, what + ": d(sinks)");
    expect_equal(again.q_BLhd, grads.q_BLhd, "dq twice");
    expect_equal(again.k_BSgd, grads.k_BSgd, "dk twice");
    expect_equal(again.v_BSgv, grads.v_BSgv, "dv twice");
    expect_equal(attention_forward(s.config, in).y_BLhv, out.y_BLhv, "y twice");
  }
}

// A query never looks ahead: what comes later may be anything, and gets no gradient.
TEST_P(Attention, TheFutureIsNotSeen) {
  at::manual_seed(3);
  const AttentionConfig config{.scale = 0.3, .start = 0};
  const auto random = [&](std::int64_t positions) {
    return at::randn({1, positions, 2, 8}, at::kDouble).to(GetParam());
  };
  AttentionInput in{random(30), random(100), random(100), {}};
  const at::Tensor before = attention_forward(config, in).y_BLhv;
  in.k_BSgd.narrow(1, 30, 70).fill_(50), in.v_BSgv.narrow(1, 30, 70).fill_(-1000);
  const AttentionOutput after = attention_forward(config, in);
  EXPECT_TRUE(after.y_BLhv.equal(before));
  const AttentionGradients grads = attention_backward(config, in, after, random(30));
  EXPECT_TRUE(grads.k_BSgd.narrow(1, 30, 70).eq(0).all().item<bool>());
  EXPECT_TRUE(grads.v_BSgv.narrow(1, 30, 70).eq(0).all().item<bool>());
}

TEST_P(Attention, DoesNotDependOnTheNumberOfThreads) {
  at::manual_seed(5);
  const AttentionConfig config{.scale = 0.3};
  const auto random = [&](std::int64_t heads) {
    return at::randn({2, 90, heads, 8}, at::kDouble).to(GetParam());
  };
  const AttentionInput in{random(6), random(3), random(3), {}};
  const at::Tensor dy = random(6);
  const int before = at::get_num_threads();
  std::vector<at::Tensor> dk, y;
  for (int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    const AttentionOutput out = attention_forward(config, in);
    y.push_back(out.y_BLhv), dk.push_back(attention_backward(config, in, out, dy).k_BSgd);
  }
  at::set_num_threads(before);
  for (size_t i = 1; i < y.size(); ++i) EXPECT_TRUE(y[i].equal(y[0]) && dk[i].equal(dk[0]));
}

TEST(AttentionErrors, SayWhatDoesNotFit) {
  const at::Tensor q = at::zeros({1, 4, 3, 8}), k = at::zeros({1, 4, 2, 8});
  try {
    attention_forward({}, {q, k, k, {}});
    FAIL() << "3 query heads on 2 key heads were taken";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("3 query heads and 2 key heads"), std::string::npos)
        << e.what();
  }
  EXPECT_THROW(attention_forward({.start = 3}, {k, k, k, {}}), Error);
}

}  // namespace
}  // namespace moesh::kernels
