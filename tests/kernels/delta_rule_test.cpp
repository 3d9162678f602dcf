// The delta rule in chunks against one token after the other.

#include "moesh/kernels/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/kernels/ref_delta_rule.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

struct Sizes {
  std::int64_t B, L, g, h, d, v;
};

enum class Start { plain, documents, state };

// About two in `period` tokens begin a document.
at::Tensor documents_of(std::int64_t B, std::int64_t L, std::int64_t period = 9) {
  at::Tensor starts = at::zeros({B, L}, at::kLong);
  for (std::int64_t b = 0; b < B; ++b) {
    std::int64_t start = 0;
    for (std::int64_t t = 1; t < L; ++t) {
      // Some of one token, some longer than a chunk.
      if ((t * 7 + b * 5) % period < 2) start = t;
      starts[b][t] = start;
    }
  }
  return starts;
}

DeltaRuleInput input_of(const Sizes& s, Start start) {
  at::manual_seed(5);
  const auto wide = at::TensorOptions().dtype(at::kDouble);
  DeltaRuleInput in{.qkv_BLgc = at::randn({s.B, s.L, s.g, 2 * s.d + s.h / s.g * s.v}, wide),
                    .decay_BLh = -at::rand({s.B, s.L, s.h}, wide),
                    .beta_BLh = at::rand({s.B, s.L, s.h}, wide),
                    .key_dim = s.d};
  if (start == Start::documents) in.starts_BL = documents_of(s.B, s.L);
  if (start == Start::state) in.state_Bhdv = at::randn({s.B, s.h, s.d, s.v}, wide);
  return in;
}

std::vector<at::Tensor*> parts(DeltaRuleInput& in) {
  return {&in.qkv_BLgc, &in.decay_BLh, &in.beta_BLh};
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  return (a.to(at::kDouble) - b).abs().max().item<double>();
}

const Sizes kSizes[] = {{1, 1, 1, 1, 3, 2},
                        {2, 7, 2, 4, 3, 4},
                        {1, 12, 1, 1, 4, 3},
                        {3, 9, 1, 3, 2, 5},
                        {1, 26, 2, 2, 5, 1}};

TEST(DeltaRule, IsThatOfOneTokenAfterTheOther) {
  for (const Sizes& s : kSizes)
    for (const Start start : {Start::plain, Start::documents, Start::state}) {
      const DeltaRuleInput in = input_of(s, start);
      DeltaRuleInput leaves = in;
      for (at::Tensor* t : parts(leaves)) *t = t->clone().requires_grad_(true);
      const DeltaRuleOutput wanted = ref::delta_rule(leaves);
      const at::Tensor dy = at::arange(wanted.y_BLhv.numel(), wanted.y_BLhv.options())
                                .sin()
                                .reshape(wanted.y_BLhv.sizes());
      (wanted.y_BLhv * dy).sum().backward();
      for (const std::int64_t chunk : {1, 2, 4, 5, 12, 64}) {
        SCOPED_TRACE(testing::Message() << "L " << s.L << " h " << s.h << " chunk " << chunk
                                        << " start " << static_cast<int>(start));
        const DeltaRuleOutput found = delta_rule_forward(in, chunk);
        EXPECT_LT(difference(found.y_BLhv, wanted.y_BLhv.detach()), 1e-12);
        EXPECT_LT(difference(found.state_Bhdv, wanted.state_Bhdv.detach()), 1e-12);
        const DeltaRuleGradients d = delta_rule_backward(in, dy, chunk);
        EXPECT_LT(difference(d.qkv_BLgc, leaves.qkv_BLgc.grad()), 1e-11);
        EXPECT_LT(difference(d.decay_BLh, leaves.decay_BLh.grad()), 1e-11);
        EXPECT_LT(difference(d.beta_BLh, leaves.beta_BLh.grad()), 1e-11);
      }
    }
}

// Rounded inputs, and sums in float32.
TEST(DeltaRule, OfBfloat16IsComputedInFloat32) {
  DeltaRuleInput in = input_of({2, 70, 2, 4, 16, 8}, Start::documents);
  DeltaRuleInput narrow = in, rounded = in;
  narrow.qkv_BLgc = in.qkv_BLgc.to(at::kBFloat16);
  rounded.qkv_BLgc = narrow.qkv_BLgc.to(at::kDouble);
  narrow.decay_BLh = in.decay_BLh.to(at::kFloat), narrow.beta_BLh = in.beta_BLh.to(at::kFloat);
  const DeltaRuleOutput wanted = ref::delta_rule(rounded), found = delta_rule_forward(narrow, 64);
  EXPECT_EQ(found.y_BLhv.scalar_type(), at::kBFloat16);
  EXPECT_EQ(found.state_Bhdv.scalar_type(), at::kFloat);
  const double largest = wanted.y_BLhv.abs().max().item<double>();
  EXPECT_LT(difference(found.y_BLhv, wanted.y_BLhv), largest / 128);
  EXPECT_LT(difference(found.state_Bhdv, wanted.state_Bhdv), 1e-5);
}

// Heads as wide as the own kernels of a GPU take them, in tensors with gaps: 2-norms of what is
// rounded to bfloat16.
TEST(DeltaRule, OfWideHeadsIsThatOfOneTokenAfterTheOther) {
  for (const Start start : {Start::plain, Start::documents, Start::state}) {
    DeltaRuleInput in = input_of({1, 70, 1, 2, 128, 128}, start);
    if (start == Start::documents) in.starts_BL = documents_of(1, 70, 101);
    DeltaRuleInput narrow = in, leaves = in;
    const at::Tensor with_gaps = at::cat({in.qkv_BLgc, in.qkv_BLgc}, 3);
    narrow.qkv_BLgc = with_gaps.to(test_device(), at::kBFloat16).narrow(3, 0, in.qkv_BLgc.size(3));
    narrow.decay_BLh = in.decay_BLh.to(test_device(), at::kFloat);
    narrow.beta_BLh = in.beta_BLh.to(test_device(), at::kFloat);
    for (at::Tensor* t : {&narrow.starts_BL, &narrow.state_Bhdv})
      if (t->defined()) *t = t->to(test_device());
    leaves.qkv_BLgc = narrow.qkv_BLgc.cpu().to(at::kDouble);
    for (at::Tensor* t : parts(leaves)) *t = t->clone().requires_grad_(true);
    const DeltaRuleOutput wanted = ref::delta_rule(leaves);
    const at::Tensor dy = normal(wanted.y_BLhv.sizes(), "dy", at::kBFloat16);
    (wanted.y_BLhv * dy.cpu().to(at::kDouble)).sum().backward();
    const Poison poison;
    const DeltaRuleOutput found = delta_rule_forward(narrow, 64);
    expect_close(found.y_BLhv, wanted.y_BLhv, 1e-2, "y");
    expect_close(found.state_Bhdv, wanted.state_Bhdv, 1e-2, "the state");
    if (start == Start::state) continue;  // backward begins with zeros
    const DeltaRuleGradients d = delta_rule_backward(narrow, dy, 64);
    const at::Tensor d_qkv = leaves.qkv_BLgc.grad();
    for (const int part : {0, 1, 2})
      expect_close(d.qkv_BLgc.narrow(3, part * 128, 128), d_qkv.narrow(3, part * 128, 128), 1e-2,
                   part == 0   ? "dq"
                   : part == 1 ? "dk"
                               : "dv");
    expect_close(d.decay_BLh, leaves.decay_BLh.grad(), 1e-2, "the decay's gradient");
    expect_close(d.beta_BLh, leaves.beta_BLh.grad(), 1e-2, "beta's gradient");
  }
}

TEST(Convolution, OfBfloat16IsThatOfOneTokenAfterTheOther) {
  for (const bool has_documents : {false, true}) {
    const std::int64_t B = 2, L = 131, g = 2, c = 24;
    const at::Tensor x = normal({B, L, g, 2 * c}, "x", at::kBFloat16).narrow(3, 0, c),
                     w = normal({g, c, 4}, "w", at::kFloat), starts = documents_of(B, L);
    const at::Tensor wide_x = x.cpu().to(at::kDouble).requires_grad_(true),
                     wide_w = w.cpu().to(at::kDouble).requires_grad_(true);
    const at::Tensor wanted =
        ref::convolution(wide_x, wide_w, has_documents ? starts : at::Tensor());
    const at::Tensor dy = normal(wanted.sizes(), "dy", at::kBFloat16),
                     on_device = has_documents ? starts.to(test_device()) : at::Tensor();
    (wanted * dy.cpu().to(at::kDouble)).sum().backward();
    const Poison poison;
    expect_close(convolution_forward(x, w, on_device), wanted, 1e-2, "y");
    const ConvolutionGradients d = convolution_backward(x, w, on_device, dy);
    expect_close(d.x, wide_x.grad(), 1e-2, "dx");
    expect_close(d.w, wide_w.grad(), 1e-2, "dw");
  }
}

TEST(Convolution, IsThatOfOneTokenAfterTheOther) {
  for (const Sizes& s : kSizes)
    for (const std::int64_t num_taps : {1, 2, 4})
      for (const bool has_documents : {false, true}) {
        at::manual_seed(8);
        const at::Tensor x = at::randn({s.B, s.L, s.g, s.d}, at::kDouble).requires_grad_(true),
                         w = at::randn({s.g, s.d, num_taps}, at::kDouble).requires_grad_(true),
                         starts = has_documents ? documents_of(s.B, s.L) : at::Tensor();
        const at::Tensor wanted = ref::convolution(x, w, starts);
        const at::Tensor dy = at::arange(wanted.numel(), at::kDouble).sin().reshape(x.sizes());
        (wanted * dy).sum().backward();
        EXPECT_LT(difference(convolution_forward(x, w, starts), wanted.detach()), 1e-13);
        const ConvolutionGradients d = convolution_backward(x, w, starts, dy);
        EXPECT_LT(difference(d.x, x.grad()), 1e-12);
        EXPECT_LT(difference(d.w, w.grad()), 1e-12);
      }
}

}  // namespace
}  // namespace moesh::kernels
