// Which attention goes to FlashAttention, and what its memory is, on meta; its numbers need a GPU
// (attention_gpu_test.cpp).

#include "moesh/nn/attention_functions.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "moesh/kernels/meta/dry_run.h"

namespace moesh {
namespace {

// Every size is another, so that none can stand for another.
constexpr std::int64_t kFlashBatch = 2, kQueries = 16, kKeys = 24, kFlashHeads = 8, kGroups = 4,
                       kWidth = 64;

struct Case {
  kernels::AttentionConfig config{.scale = 1, .start = kKeys - kQueries, .window = 4};
  std::int64_t queries = kQueries, width = kWidth, value_width = kWidth;
  at::ScalarType dtype = at::kBFloat16;
  at::Device device = at::kMeta;
  bool has_sinks = false, has_documents = false;

  at::Tensor tensor(std::int64_t length, std::int64_t heads, std::int64_t last) const {
    return at::empty({kFlashBatch, length, heads, last}, at::TensorOptions(device).dtype(dtype));
  }
  bool taken() const {
    const at::Tensor sinks =
        has_sinks ? at::empty({kFlashHeads}, at::TensorOptions(device)) : at::Tensor();
    const at::Tensor starts = has_documents ? at::empty({kFlashBatch, queries},
                                                        at::TensorOptions(device).dtype(at::kLong))
                                            : at::Tensor();
    return nn::takes_flash_attention(
        config, {tensor(queries, kFlashHeads, width), tensor(kKeys, kGroups, width),
                 tensor(kKeys, kGroups, value_width), sinks, starts});
  }
};

template <class F>
bool taken(F change) {
  Case c;
  change(c);
  return c.taken();
}

TEST(FlashAttention, TakesWindowsAndSinks) {
  EXPECT_TRUE(Case().taken());
  EXPECT_TRUE(taken([](Case& c) { c.config.window = 1; }));
  EXPECT_TRUE(taken([](Case& c) { c.config.window = 0, c.has_sinks = true; }));
  EXPECT_TRUE(taken([](Case& c) { c.has_sinks = true; }));
  EXPECT_TRUE(taken([](Case& c) { c.width = c.value_width = 256; }));
  EXPECT_TRUE(taken([](Case& c) { c.config.chunk = kKeys; })) << "one chunk";
  EXPECT_TRUE(taken([](Case& c) { c.value_width = 32; }));
}

// As the queries of a cp rank have them, which end where their keys end.
TEST(FlashAttention, TakesQueriesBehindTheFirstKeys) {
  EXPECT_TRUE(taken([](Case& c) { c.config.window = 0; }));
  EXPECT_TRUE(taken([](Case& c) { c.config.window = kKeys; })) << "a window that hides nothing";
  EXPECT_TRUE(taken([](Case& c) { c.config.window = 0, c.value_width = 32; }));
  EXPECT_FALSE(taken([](Case& c) { c.config.window = 0, c.config.start -= 1; }));
}

TEST(FlashAttention, TakesDocuments) {
  const auto of_documents = [](auto change) {
    return taken([&](Case& c) { c.config.window = 0, c.has_documents = true, change(c); });
  };
  EXPECT_TRUE(of_documents([](Case&) {}));
  EXPECT_TRUE(of_documents([](Case& c) { c.config.start -= 1; })) << "keys after the last query";
  EXPECT_TRUE(of_documents([](Case& c) { c.value_width = 32; }));
  EXPECT_FALSE(of_documents([](Case& c) { c.value_width = 72; }));
  // A document that began before the first key may have a chunk that ends between the keys.
  EXPECT_FALSE(of_documents([](Case& c) { c.config.chunk = kKeys; }));
}

// Each for only one reason.
TEST(FlashAttention, LeavesTheRestToOtherKernels) {
  const auto all = [](Case& c) { c.queries = kKeys, c.config.start = 0; };
  EXPECT_FALSE(taken([&](Case& c) { all(c), c.config.window = 0; })) << "plain attention";
  EXPECT_FALSE(taken([&](Case& c) { all(c), c.config.window = kKeys; })) << "it hides nothing";
  EXPECT_FALSE(taken([](Case& c) { c.config.chunk = 1; }));
  EXPECT_FALSE(taken([](Case& c) { c.config.chunk = kKeys - 1; }));
  EXPECT_FALSE(taken([](Case& c) { c.config.start -= 1; })) << "keys after the last query";
  EXPECT_FALSE(taken([](Case& c) { c.queries = 0, c.config.start = kKeys; }));
  EXPECT_FALSE(taken([](Case& c) { c.value_width = 72; }));
  EXPECT_FALSE(taken([](Case& c) { c.width = c.value_width = 60; }));
  EXPECT_FALSE(taken([](Case& c) { c.width = c.value_width = 264; }));
  EXPECT_FALSE(taken([](Case& c) { c.dtype = at::kFloat; }));
  EXPECT_FALSE(taken([](Case& c) { c.device = at::kCPU; }));
}

struct Leaves {
  at::Tensor q, k, v, sinks;
};

Leaves leaves(bool has_sinks) {
  const Case c;
  Leaves in{c.tensor(kQueries, kFlashHeads, kWidth),
            c.tensor(kKeys, kGroups, kWidth),
            c.tensor(kKeys, kGroups, kWidth),
            {}};
  for (at::Tensor* x : {&in.q, &in.k, &in.v}) x->requires_grad_(true);
  if (has_sinks)
    in.sinks = at::empty({kFlashHeads}, at::TensorOptions(at::kMeta)).requires_grad_(true);
  return in;
}

TEST(FlashAttention, HasTheShapesOfItsInputs) {
  const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
  for (const bool has_sinks : {false, true}) {
    const Leaves in = leaves(has_sinks);
    const at::Tensor y = nn::flash_attention(Case().config, {in.q, in.k, in.v, in.sinks});
    ASSERT_EQ(y.sizes(), in.q.sizes());
    y.backward(at::empty_like(y));
    for (const at::Tensor& x : {in.q, in.k, in.v}) {
      ASSERT_TRUE(x.grad().defined());
      EXPECT_EQ(x.grad().sizes(), x.sizes());
    }
    if (!has_sinks) continue;
    ASSERT_TRUE(in.sinks.grad().defined());
    EXPECT_EQ(in.sinks.grad().sizes(), in.sinks.sizes());
  }
}

// Backward holds, besides the gradients, d(q) in float32 and d(k), d(v) of every query head.
TEST(FlashAttention, CountsWhatBackwardHoldsBesideTheGradients) {
  const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
  const Leaves in = leaves(false);
  const at::Tensor y = nn::flash_attention(Case().config, {in.q, in.k, in.v, {}});
  const at::Tensor dy = at::empty_like(y);
  const std::int64_t before = memory.live();
  y.backward(dy);
  const std::int64_t of_queries = kFlashBatch * kQueries * kFlashHeads * kWidth,
                     of_keys = kFlashBatch * kKeys * kGroups * kWidth;
  EXPECT_EQ(memory.peak() - before, 2 * (of_queries + 2 * of_keys) + 4 * of_queries +
                                        2 * 2 * of_keys * kFlashHeads / kGroups);
}

// With documents, d(q) has room for 128 more rows of each, and of each sequence.
TEST(FlashAttention, CountsTheRoomOfDocumentsInBackward) {
  constexpr std::int64_t kDocuments = 5;
  const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
  const Leaves in = leaves(false);
  Case c;
  c.config.most_documents = kDocuments;
  const at::Tensor starts =
      at::empty({kFlashBatch, kQueries}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  const at::Tensor y = nn::flash_attention(c.config, {in.q, in.k, in.v, {}, starts});
  const at::Tensor dy = at::empty_like(y);
  const std::int64_t before = memory.live();
  y.backward(dy);
  const std::int64_t of_queries = kFlashBatch * kQueries * kFlashHeads * kWidth,
                     of_keys = kFlashBatch * kKeys * kGroups * kWidth,
                     room = 128 * (kDocuments + kFlashBatch) * kFlashHeads * kWidth;
  EXPECT_EQ(memory.peak() - before, 2 * (of_queries + 2 * of_keys) + 4 * (of_queries + room) +
                                        2 * 2 * of_keys * kFlashHeads / kGroups);
}

// Heads that are parts of a larger row are taken where they are.
TEST(FlashAttention, CopiesOnlyWhatIsNotInRows) {
  const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
  const Case c;
  const at::Tensor wide = c.tensor(kKeys, kFlashHeads, 3 * kWidth);
  const auto part = [&](std::int64_t i) { return wide.narrow(3, i * kWidth, kWidth); };
  const auto grown = [&](const at::Tensor& k) {
    const at::NoGradGuard no_grad;
    const std::int64_t before = memory.live();
    const at::Tensor y = nn::flash_attention({.scale = 1, .window = 4}, {part(0), k, part(2), {}});
    return memory.peak() - before;
  };
  const std::int64_t in_place = grown(part(1));
  const at::Tensor columns = c.tensor(kKeys, kFlashHeads, kWidth).transpose(2, 3).contiguous();
  EXPECT_EQ(grown(columns.transpose(2, 3)) - in_place,
            2 * kFlashBatch * kKeys * kFlashHeads * kWidth);
}

}  // namespace
}  // namespace moesh
