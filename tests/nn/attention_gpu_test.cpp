// Which of LibTorch's kernels attention gets on a GPU, and that its results are right.

#include <ATen/ATen.h>
#include <ATen/SDPBackend.h>
#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/nn/attention_functions.h"
#include "tests/nn/documents.h"

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
                      const at::Tensor& v, const at::Tensor& sinks, const at::Tensor& starts = {}) {
  const auto per_group = q.size(2) / k.size(2);
  const at::Tensor keys = k.repeat_interleave(per_group, 2).permute({0, 2, 3, 1}),
                   values = v.repeat_interleave(per_group, 2).transpose(1, 2);
  const auto index = at::TensorOptions(q.device()).dtype(at::kLong);
  const at::Tensor query = at::arange(c.start, c.start + q.size(1), index).unsqueeze(1),
                   key = at::arange(k.size(1), index);
  at::Tensor hidden = key > query;
  if (c.window > 0) hidden = hidden.logical_or(key <= query - c.window);
  if (starts.defined()) hidden = hidden.logical_or(key < starts.unsqueeze(1).unsqueeze(3));
  at::Tensor scores = (q.transpose(1, 2).matmul(keys) * c.scale).masked_fill(hidden, -INFINITY);
  if (sinks.defined()) scores = at::cat({scores, sinks}, 3);
  return scores.softmax(-1).narrow(3, 0, k.size(1)).matmul(values).transpose(1, 2);
}

// A sink of each query, [B, h, L, 1]: their gradients have both signs, and what is left of their
// sum may be small beside the rounding of its terms.
at::Tensor of_queries(const at::Tensor& sinks, const at::Tensor& q) {
  return sinks.detach()
      .to(at::kDouble)
      .reshape({1, -1, 1, 1})
      .expand({q.size(0), q.size(2), q.size(1), 1})
      .contiguous()
      .requires_grad_(true);
}

double error_of_sums(const at::Tensor& got_h, const at::Tensor& terms_BhL1) {
  const at::Tensor terms = terms_BhL1.transpose(0, 1).reshape({got_h.numel(), -1});
  return ((got_h.to(at::kDouble) - terms.sum(1)) / terms.norm(2, 1)).abs().max().item<double>();
}

// Windows and sinks, with and without each other, and queries that begin in the middle, as those of
// a later cp rank do; values narrower than keys.
TEST(AttentionOnAGpu, WindowsSinksAndLaterQueriesGoWithoutAMask) {
  at::manual_seed(2);
  for (const std::int64_t window : {0, 1, 100, 5000})
    for (const bool has_sinks : {true, false})
      for (const std::int64_t start : {0, 90}) {
        // For plain attention this kernel is not asked, and of one key nothing depends on its
        // score.
        if (!has_sinks && (window == 1 || (window != 100 && start == 0))) continue;
        const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
        const auto leaf = [&](std::int64_t length, std::int64_t heads, std::int64_t width) {
          return at::randn({2, length, heads, width}, options).requires_grad_(true);
        };
        const at::Tensor q = leaf(200, 8, 64), k = leaf(200 + start, 2, 64),
                         v = leaf(200 + start, 2, start == 0 ? 64 : 40);
        at::Tensor sinks;
        if (has_sinks)
          sinks = at::randn({8}, options.dtype(at::kFloat)).mul_(2).requires_grad_(true);
        const kernels::AttentionConfig config{.scale = 0.125, .start = start, .window = window};
        ASSERT_TRUE(nn::takes_flash_attention(config, {q, k, v, sinks}));
        const auto wide = [](const at::Tensor& x) {
          return x.defined() ? x.detach().to(at::kDouble).requires_grad_(true) : x;
        };
        const at::Tensor ws = has_sinks ? of_queries(sinks, q) : at::Tensor();
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
        EXPECT_LT(error_of_sums(sinks.grad(), ws.grad()), 1e-2) << what;
      }
}

struct Leaves {
  at::Tensor q, k, v, sinks;

  Leaves wide() const {
    const auto to_double = [](const at::Tensor& x) {
      return x.defined() ? x.detach().to(at::kDouble).requires_grad_(true) : x;
    };
    return {to_double(q), to_double(k), to_double(v),
            sinks.defined() ? of_queries(sinks, q) : sinks};
  }
};

void expect_document_attention(const kernels::AttentionConfig& c, const Leaves& x,
                               const at::Tensor& starts, const std::string& what) {
  const Leaves w = x.wide();
  const at::Tensor want = with_sinks(c, w.q, w.k, w.v, w.sinks, starts);
  const at::Tensor dy = at::randn(want.sizes(), x.q.options());
  const at::Tensor y = nn::composed_attention(c, {x.q, x.k, x.v, x.sinks, starts});
  ASSERT_EQ(y.sizes(), want.sizes());
  y.backward(dy), want.backward(dy.to(at::kDouble));
  EXPECT_LT(error(y, want), 1e-2) << what;
  EXPECT_LT(error(x.q.grad(), w.q.grad()), 1e-2) << what;
  EXPECT_LT(error(x.k.grad(), w.k.grad()), 1e-2) << what;
  EXPECT_LT(error(x.v.grad(), w.v.grad()), 1e-2) << what;
  if (x.sinks.defined()) {
    EXPECT_LT(error_of_sums(x.sinks.grad(), w.sinks.grad()), 1e-2) << what;
  }
}

// Sequences with one document and with many, of one token and of hundreds; queries of a second cp
// rank, whose first document begins before them, on this rank's keys or before; values narrower
// than keys. With and without windows and sinks: no mask.
TEST(AttentionOnAGpu, StaysWithinDocumentsWithoutAMask) {
  at::manual_seed(3);
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const std::vector<std::vector<std::int64_t>> lengths{{1, 130, 1, 1, 67, 100}, {300}, {150, 150}};
  for (const auto& s : {Shape{4, 4, 192, 128}, Shape{8, 2, 64, 64}})
    for (const std::int64_t start : {0, 90})
      for (const std::int64_t first : {std::int64_t{0}, std::int64_t{40}, std::int64_t{-5}})
        for (const std::int64_t window : {0, 50})
          for (const bool has_sinks : {false, true}) {
            if (start == 0 && first != 0) continue;
            const auto leaf = [&](std::int64_t length, std::int64_t heads, std::int64_t width) {
              return at::randn({3, length, heads, width}, options).requires_grad_(true);
            };
            // Keys behind the last query, too: where a window or chunk does not cut them off.
            const std::int64_t num_keys = 300 + start + (start > 0 ? 13 : 0);
            Leaves x{leaf(300, s.heads, s.width),
                     leaf(num_keys, s.groups, s.width),
                     leaf(num_keys, s.groups, s.value_width),
                     {}};
            if (has_sinks)
              x.sinks = at::randn({s.heads}, options.dtype(at::kFloat)).requires_grad_(true);
            const at::Tensor starts = starts_of(lengths, first, start).to(at::kCUDA);
            const kernels::AttentionConfig c{
                .scale = 0.125, .start = start, .window = window, .most_documents = 9};
            ASSERT_TRUE(nn::takes_flash_attention(c, {x.q, x.k, x.v, x.sinks, starts}));
            expect_document_attention(
                c, x, starts,
                detail::concat("width ", s.width, ", start ", start, ", first ", first, ", window ",
                               window, has_sinks ? ", sinks" : ""));
          }
}

// What that kernel does not take has a mask: chunks, which count from where a document begins.
// A chunk is a document of its own. With as many keys as a chunk has, too: a document that began
// before the first of them, on another cp rank, has a chunk that ends between them.
TEST(AttentionOnAGpu, StaysWithinDocumentsInChunks) {
  at::manual_seed(4);
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const auto leaf = [&](std::int64_t heads) {
    return at::randn({2, 96, heads, 64}, options).requires_grad_(true);
  };
  for (const std::int64_t chunk : {32, 96}) {
    const Leaves x{leaf(4), leaf(2), leaf(2), {}};
    const at::Tensor starts = starts_of({{40, 56}, {96}}, chunk == 96 ? -50 : 0).to(at::kCUDA);
    const kernels::AttentionConfig c{.scale = 0.125, .chunk = chunk, .most_documents = 4};
    ASSERT_FALSE(nn::takes_flash_attention(c, {x.q, x.k, x.v, {}, starts}));
    const at::Tensor position = at::arange(96, starts.options()),
                     chunks = position - (position - starts).remainder(chunk);
    const Leaves w = x.wide();
    const at::Tensor want = with_sinks({.scale = 0.125}, w.q, w.k, w.v, {}, chunks);
    const at::Tensor y = nn::composed_attention(c, {x.q, x.k, x.v, {}, starts});
    EXPECT_LT(error(y, want), 1e-2) << chunk;
  }
}

// A recompute that keeps takes what the first run has: the gradients of none, bit by bit.
TEST(AttentionOnAGpu, IsKeptByARecompute) {
  at::manual_seed(6);
  const auto options = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const auto random = [&](std::int64_t heads, std::int64_t width) {
    return at::randn({2, 128, heads, width}, options);
  };
  struct Case {
    kernels::AttentionConfig config;
    Shape shape;
    bool has_sinks;
  };
  for (const Case& c : {Case{{.scale = 0.1}, {4, 4, 192, 128}, false},
                        Case{{.scale = 0.1, .window = 40}, {4, 2, 64, 64}, true}}) {
    const at::Tensor q = random(c.shape.heads, c.shape.width),
                     k = random(c.shape.groups, c.shape.width),
                     v = random(c.shape.groups, c.shape.value_width);
    const at::Tensor sinks =
        c.has_sinks ? at::randn({c.shape.heads}, options.dtype(at::kFloat)) : at::Tensor();
    const at::Tensor dy = random(c.shape.heads, c.shape.value_width);
    const auto gradients = [&](bool again) {
      std::vector<at::Tensor> leaves;
      for (const at::Tensor& t : {q, k, v, sinks})
        leaves.push_back(t.defined() ? t.clone().requires_grad_(true) : t);
      const auto run = [&](const at::Tensor& x, bool) {
        return std::vector<at::Tensor>{
            nn::composed_attention(c.config, {x, leaves[1], leaves[2], leaves[3]})};
      };
      const at::Tensor y =
          again ? raw::recompute(run, leaves[0], Keep::expensive)[0] : run(leaves[0], false)[0];
      y.backward(dy);
      std::vector<at::Tensor> found{y.detach()};
      for (const auto& leaf : leaves)
        if (leaf.defined()) found.push_back(leaf.grad());
      return found;
    };
    const auto expected = gradients(false), found = gradients(true);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LT(error(found[i], expected[i].to(at::kDouble)), 1e-3) << c.shape.width << ", " << i;
  }
}

}  // namespace
}  // namespace moesh
