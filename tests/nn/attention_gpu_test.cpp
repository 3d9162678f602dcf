// Which of LibTorch's kernels attention gets on a GPU, and that its results are right.

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/nn/composed_attention.h"
#include "moesh/nn/flash_attention.h"

namespace moesh {
namespace {

struct Shape {
  std::int64_t heads, groups, width, value_width;
};

at::Tensor causal(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  const auto per_group = q.size(2) / k.size(2);
  const at::Tensor keys = k.repeat_interleave(per_group, 2).permute({0, 2, 3, 1}),
                   values = v.repeat_interleave(per_group, 2).transpose(1, 2);
  const at::Tensor scores = q.transpose(1, 2).matmul(keys) * scale;
  const at::Tensor hidden = at::ones({q.size(1), q.size(1)}, q.options().dtype(at::kBool)).triu(1);
  return scores.masked_fill(hidden, -INFINITY).softmax(-1).matmul(values).transpose(1, 2);
}

double error(const at::Tensor& got, const at::Tensor& want) {
  return ((got.to(at::kDouble) - want).norm() / want.norm()).item<double>();
}

// On Hopper, cuDNN's kernel: values narrower than keys (MLA), and fewer key heads than query heads,
// go to it as they are.
TEST(AttentionOnAGpu, GoesToTheFastestKernelAsItIs) {
  at::manual_seed(1);
  for (const Shape& s : {Shape{4, 4, 192, 128}, Shape{8, 2, 128, 128}, Shape{8, 1, 64, 64}}) {
    const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
    const auto leaf = [&](std::int64_t heads, std::int64_t width) {
      return at::randn({2, 200, heads, width}, options).requires_grad_(true);
    };
    const at::Tensor q = leaf(s.heads, s.width), k = leaf(s.groups, s.width),
                     v = leaf(s.groups, s.value_width);
    const double scale = 1 / std::sqrt(static_cast<double>(s.width));
    const auto heads = [](const at::Tensor& x) { return x.transpose(1, 2); };
    const auto kernel = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
        heads(q), heads(k), heads(v), {}, 0.0, true, scale, s.heads != s.groups));
    EXPECT_EQ(kernel, at::SDPBackend::cudnn_attention) << s.width << ", " << s.value_width;
    const auto wide = [](const at::Tensor& x) {
      return x.detach().to(at::kDouble).requires_grad_(true);
    };
    const at::Tensor wq = wide(q), wk = wide(k), wv = wide(v), want = causal(wq, wk, wv, scale);
    const at::Tensor dy = at::randn(want.sizes(), options);
    const at::Tensor y = nn::composed_attention({.scale = scale}, {q, k, v, {}});
    ASSERT_EQ(y.sizes(), want.sizes());
    EXPECT_TRUE(y.is_contiguous());  // merging heads copies nothing
    y.backward(dy), want.backward(dy.to(at::kDouble));
    EXPECT_LT(error(y, want), 1e-2);
    EXPECT_LT(error(q.grad(), wq.grad()), 1e-2);
    EXPECT_LT(error(k.grad(), wk.grad()), 1e-2);
    EXPECT_LT(error(v.grad(), wv.grad()), 1e-2);
  }
}

// sinks [B, h, L, 1]
at::Tensor with_sinks(const kernels::AttentionConfig& c, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, const at::Tensor& sinks) {
  const auto per_group = q.size(2) / k.size(2);
  const at::Tensor keys = k.repeat_interleave(per_group, 2).permute({0, 2, 3, 1}),
                   values = v.repeat_interleave(per_group, 2).transpose(1, 2);
  const auto index = at::TensorOptions(q.device()).dtype(at::kLong);
  const at::Tensor query = at::arange(c.start, c.start + q.size(1), index).unsqueeze(1),
                   key = at::arange(k.size(1), index);
  at::Tensor hidden = key > query;
  if (c.window > 0) hidden = hidden.logical_or(key <= query - c.window);
  at::Tensor scores = (q.transpose(1, 2).matmul(keys) * c.scale).masked_fill(hidden, -INFINITY);
  if (sinks.defined()) scores = at::cat({scores, sinks}, 3);
  return scores.softmax(-1).narrow(3, 0, k.size(1)).matmul(values).transpose(1, 2);
}

// Windows and sinks, with and without each other, and queries that begin in the middle.
TEST(AttentionOnAGpu, WindowsAndSinksGoWithoutAMask) {
  at::manual_seed(2);
  for (const std::int64_t window : {0, 1, 100, 5000})
    for (const bool has_sinks : {true, false})
      for (const std::int64_t start : {0, 90}) {
        // Without a window this kernel is not asked, and of one key nothing depends on its score.
        if (!has_sinks && window != 100) continue;
        const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
        const auto leaf = [&](std::int64_t length, std::int64_t heads) {
          return at::randn({2, length, heads, 64}, options).requires_grad_(true);
        };
        // Keys that are not in rows, as a kernel wants them.
        const at::Tensor k_columns = at::randn({2, 200 + start, 64, 2}, options);
        const at::Tensor q = leaf(200, 8), k = k_columns.transpose(2, 3).requires_grad_(true),
                         v = leaf(200 + start, 2);
        at::Tensor sinks;
        if (has_sinks)
          sinks = at::randn({8}, options.dtype(at::kFloat)).mul_(2).requires_grad_(true);
        const kernels::AttentionConfig config{.scale = 0.125, .start = start, .window = window};
        ASSERT_TRUE(nn::takes_flash_attention(config, {q, k, v, sinks}));
        const auto wide = [](const at::Tensor& x) {
          return x.defined() ? x.detach().to(at::kDouble).requires_grad_(true) : x;
        };
        // A sink of each query: their gradients have both signs, and what is left of their sum may
        // be small beside the rounding of its terms.
        at::Tensor ws;
        if (has_sinks) ws = wide(sinks.reshape({1, -1, 1, 1}).expand({2, 8, 200, 1}).contiguous());
        const at::Tensor wq = wide(q), wk = wide(k), wv = wide(v),
                         want = with_sinks(config, wq, wk, wv, ws);
        const at::Tensor dy = at::randn(want.sizes(), options);
        const at::Tensor y = nn::composed_attention(config, {q, k, v, sinks});
        y.backward(dy), want.backward(dy.to(at::kDouble));
        const auto what = detail::concat("window ", window, ", start ", start);
        EXPECT_LT(error(y, want), 1e-2) << what;
        EXPECT_LT(error(q.grad(), wq.grad()), 1e-2) << what;
        EXPECT_LT(error(k.grad(), wk.grad()), 1e-2) << what;
        EXPECT_LT(error(v.grad(), wv.grad()), 1e-2) << what;
        if (!has_sinks) continue;
        const at::Tensor terms = ws.grad().transpose(0, 1).reshape({8, -1});
        EXPECT_LT(((sinks.grad().to(at::kDouble) - terms.sum(1)) / terms.norm(2, 1))
                      .abs()
                      .max()
                      .item<double>(),
                  1e-2)
            << what;
      }
}

}  // namespace
}  // namespace moesh
