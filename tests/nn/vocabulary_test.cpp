#include "moesh/nn/vocabulary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "moesh/fsdp/fsdp.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/types/token.h"
#include "tests/comm/trace.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh {
namespace {

using enum Place;

// Runs on tp ranks; f gets the rank's slice of the vocabulary.
void over_vocabulary(int ranks, std::int64_t vocab,
                     const std::function<void(std::int64_t start, std::int64_t length)>& f) {
  comm::launch(
      ranks,
      [&](comm::Group& world) {
        const Mesh mesh(world, {.tp = ranks});
        const MeshScope scope(mesh);
        const Pieces pieces{vocab, ranks};
        f(pieces.start(mesh.coordinate(tp)), pieces.length(mesh.coordinate(tp)));
      },
      test_options());
}

TEST(CrossEntropy, IsLibTorchsOnEveryCutOfTheVocabularyAndInEveryChunk) {
  at::manual_seed(1);
  const std::int64_t tokens = 6, dim = 3;
  for (std::int64_t vocab : {1, 5, 7, 16})
    for (int ranks : {1, 2, 3, 4, 8}) {  // also more ranks than words
      const at::Tensor x = (at::randn({tokens, dim}, at::kDouble) * 10).requires_grad_(true),
                       w = at::randn({vocab, dim}, at::kDouble).requires_grad_(true);
      at::Tensor labels = at::randint(vocab, {tokens}, at::kLong);
      labels[1] = -100, labels[4] = -100;
      const at::Tensor expected =
          at::cross_entropy_loss(x.mm(w.t()), labels, {}, at::Reduction::Sum, -100);
      (expected * 0.3).backward();

      for (std::int64_t chunk : {0, 1, 4, 6, 100}) {
        // The largest logit, then both sums, of each chunk: no message more.
        const size_t num_messages = ranks == 1   ? 0
                                    : chunk == 0 ? 2
                                                 : 2 * ((tokens + chunk - 1) / chunk);
        at::Tensor dx = at::zeros_like(x), dw = at::full_like(w, NAN);
        std::mutex mutex;
        over_vocabulary(ranks, vocab, [&](std::int64_t start, std::int64_t length) {
          const auto leaf = [](const at::Tensor& t) {
            return t.detach().clone().to(test_device()).requires_grad_(true);
          };
          const at::Tensor mine = leaf(x), words = leaf(w.narrow(0, start, length));
          const comm::Trace trace;
          const auto loss =
              nn::cross_entropy(assume<Dense{T, T, R}>(mine), assume<Dense{R, R, F}>(words),
                                labels.to(test_device()), vocab, chunk);
          EXPECT_NEAR(local(loss).item<double>(), expected.item<double>(), 1e-10)
              << vocab << " words on " << ranks << " in chunks of " << chunk;
          EXPECT_EQ(trace.entries().size(), num_messages) << ranks << ", chunks of " << chunk;
          backward(once<tp>(scale(loss, 0.3)));
          const std::lock_guard lock(mutex);
          dw.narrow(0, start, length).copy_(words.grad());  // no two ranks share a word
          dx += mine.grad().cpu();                          // every rank's words contribute
        });
        EXPECT_TRUE(at::allclose(dx, x.grad(), 1e-10, 1e-12))
            << vocab << " words on " << ranks << " in chunks of " << chunk;
        EXPECT_TRUE(at::allclose(dw, w.grad(), 1e-10, 1e-12))
            << vocab << " words on " << ranks << " in chunks of " << chunk;
      }
    }
}

// In bfloat16 the gradient of the weights is summed over chunks in float32.
TEST(CrossEntropy, InBfloat16IsThatOfTheSameNumbersInFloat64) {
  at::manual_seed(2);
  const std::int64_t tokens = 40, dim = 8, vocab = 12;
  const auto narrow = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  const at::Tensor x = narrow(at::randn({tokens, dim})), w = narrow(at::randn({vocab, dim})),
                   labels = at::randint(vocab, {tokens}, at::kLong);
  const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble).requires_grad_(true); };
  const at::Tensor x64 = wide(x), w64 = wide(w);
  const at::Tensor expected =
      at::cross_entropy_loss(x64.mm(w64.t()), labels, {}, at::Reduction::Sum);
  expected.backward();
  for (const std::int64_t chunk : {0, 3})
    over_vocabulary(1, vocab, [&](std::int64_t, std::int64_t) {
      const auto leaf = [](const at::Tensor& t) {
        return t.clone().to(test_device()).requires_grad_(true);
      };
      const at::Tensor a = leaf(x), b = leaf(w);
      const auto loss = nn::cross_entropy(assume<Dense{T, T, R}>(a), assume<Dense{R, R, F}>(b),
                                          labels.to(test_device()), vocab, chunk);
      EXPECT_NEAR(local(loss).item<double>(), expected.item<double>(),
                  3e-3 * expected.item<double>());
      backward(once<tp>(loss));
      const auto error = [](const at::Tensor& g, const at::Tensor& g64) {
        return (g.cpu().to(at::kDouble) - g64).norm().item<double>() / g64.norm().item<double>();
      };
      EXPECT_LT(error(a.grad(), x64.grad()), 1e-2) << chunk;
      EXPECT_LT(error(b.grad(), w64.grad()), 1e-2) << chunk;
    });
}

// Frozen embeddings, or a frozen body: the other one learns.
TEST(CrossEntropy, HasAGradientWhereOnlyOneInputWantsIt) {
  over_vocabulary(1, 5, [](std::int64_t, std::int64_t) {
    for (const bool of_weights : {false, true}) {
      const at::Tensor x = at::ones({2, 3}, test_device()).requires_grad_(!of_weights),
                       w = at::ones({5, 3}, test_device()).requires_grad_(of_weights);
      backward(once<tp>(
          nn::cross_entropy(assume<Dense{T, T, R}>(x), assume<Dense{R, R, F}>(w),
                            at::zeros({2}, at::TensorOptions(test_device()).dtype(at::kLong)), 5)));
      EXPECT_TRUE((of_weights ? w : x).grad().defined());
    }
  });
}

TEST(CrossEntropy, HasLogitsOfAThousandTokensOr64MNumbersAtOnce) {
  EXPECT_EQ(nn::loss_chunk(1 << 15), 2048);
  EXPECT_EQ(nn::loss_chunk(1 << 16), 1024);
  EXPECT_EQ(nn::loss_chunk((1 << 15) + 1), 1024) << "whole thousands";
  EXPECT_EQ(nn::loss_chunk(200'000), 1024) << "no fewer";
  EXPECT_EQ(nn::loss_chunk(0), 1 << 26) << "a rank without words";
}

// Counted on meta: the logits of one chunk, and gradients only where they are wanted.
TEST(CrossEntropy, TakesTheMemoryOfOneChunk) {
  constexpr std::int64_t kWords = 1 << 17, kTokens = 4096, kChunk = 1024;
  const auto peak = [](std::int64_t dim, std::int64_t tokens, bool with_gradients) {
    const auto world = comm::solo_group();
    const Mesh mesh(*world, {});
    const MeshScope scope(mesh);
    const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
    const auto empty = [](at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
      return at::empty(shape, at::TensorOptions(at::kMeta).dtype(dtype));
    };
    const at::Tensor x = empty({tokens, dim}).requires_grad_(with_gradients),
                     w = empty({kWords, dim}).requires_grad_(with_gradients);
    const std::int64_t before = memory.live();
    nn::cross_entropy(assume<Dense{T, T, R}>(x), assume<Dense{R, R, F}>(w),
                      empty({tokens}, at::kLong), kWords);
    return (memory.peak() - before) / 4;  // numbers of float32
  };
  EXPECT_GE(peak(1, kTokens, true), kChunk * kWords);
  EXPECT_LT(peak(1, kTokens, true), 2 * kChunk * kWords);
  constexpr std::int64_t kWide = 512, kFew = 16;
  EXPECT_GE(peak(kWide, kFew, true), kWide * kWords);
  EXPECT_LT(peak(kWide, kFew, false), kWide * kWords / 4);
}

TEST(CrossEntropy, OfNoTokenIsZeroAndHasAGradient) {
  over_vocabulary(2, 5, [](std::int64_t, std::int64_t length) {
    const at::Tensor x = at::zeros({0, 3}, test_device()).requires_grad_(true),
                     w = at::ones({length, 3}, test_device()).requires_grad_(true);
    const auto loss =
        nn::cross_entropy(assume<Dense{T, T, R}>(x), assume<Dense{R, R, F}>(w),
                          at::zeros({0}, at::TensorOptions(test_device()).dtype(at::kLong)), 5);
    backward(once<tp>(loss));
    EXPECT_EQ(local(loss).item<double>(), 0);
    EXPECT_TRUE(at::equal(w.grad(), at::zeros_like(w)));
  });
}

TEST(CrossEntropy, RefusesALabelOutsideOfTheVocabulary) {
  expect_parts(error_of(
                   [] {
                     over_vocabulary(2, 6, [](std::int64_t, std::int64_t length) {
                       nn::cross_entropy(
                           assume<Dense{T, T, R}>(at::zeros({1, 3}, test_device())),
                           assume<Dense{R, R, F}>(at::zeros({length, 3}, test_device())),
                           at::full({1}, 6, at::TensorOptions(test_device()).dtype(at::kLong)), 6);
                     });
                   },
                   ErrorKind::data),
               {"label 6", "vocabulary of 6", "-100"});
}

TEST(Embedding, IsLibTorchsOnEveryCutOfTheVocabulary) {
  const std::int64_t vocab = 7, dim = 3;
  const at::Tensor ids = at::tensor({3, 0, 6, 3, 5, 1}, at::kLong).reshape({2, 3});
  const Init init{.kind = Init::Distribution::normal, .seed = 4};
  at::Tensor table, expected, expected_gradient;
  for (int ranks : {1, 2, 4, 8}) {
    at::Tensor gradient = at::full({vocab, dim}, NAN, at::kDouble),
               sum = at::zeros({2, 3, dim}, at::kDouble);
    std::mutex mutex;
    over_vocabulary(ranks, vocab, [&](std::int64_t start, std::int64_t length) {
      const nn::Embedding embedding("words", vocab, dim,
                                    {.dtype = at::kDouble, .device = test_device(), .init = init});
      const auto rows = embedding(ids.to(test_device()));
      const at::Tensor weights =
          at::arange(rows.local().numel(), at::kDouble).reshape({2, 3, dim}).cos();
      const auto whole_rows = all_reduce<tp, I>(rows);
      backward(once<tp>(sum_all(whole_rows * assume<Dense{T, T, I}>(weights.to(test_device())))));
      const std::lock_guard lock(mutex);
      if (ranks == 1) {
        table = embedding.weight().stored().value.detach().cpu();
        const at::Tensor leaf = table.clone().requires_grad_(true);
        expected = at::embedding(leaf, ids);
        (expected * weights).sum().backward();
        expected_gradient = leaf.grad();
      }
      EXPECT_TRUE(at::allclose(local(whole_rows).detach().cpu(), expected)) << ranks;
      gradient.narrow(0, start, length).copy_(embedding.weight().stored().value.grad());
    });
    EXPECT_TRUE(at::allclose(gradient, expected_gradient)) << ranks;
  }
}

// A word that comes 3,000 times: in bfloat16 a sum of ones ends at 256.
TEST(Embedding, SumsTheGradientOfAFrequentWordInAWiderType) {
  over_vocabulary(1, 7, [](std::int64_t, std::int64_t) {
    const nn::Embedding embedding("words", 7, 3, {.dtype = at::kBFloat16, .device = test_device()});
    const auto ids = at::full({2, 1500}, 4, at::TensorOptions(at::kLong).device(test_device()));
    local(embedding(ids)).sum().backward();
    const at::Tensor g = embedding.weight().stored().value.grad().cpu().to(at::kDouble);
    EXPECT_NEAR(g[4][1].item<double>(), 3000, 3000 * 0x1p-8);
    EXPECT_EQ(g.sum(1).count_nonzero().item<std::int64_t>(), 1);
  });
}

// A rank may have no token; one that has a single wrong one is told so.
TEST(Embedding, TakesNoTokenAndRefusesAWrongOne) {
  over_vocabulary(2, 7, [](std::int64_t, std::int64_t) {
    const nn::Embedding embedding("words", 7, 3, {.dtype = at::kDouble, .device = test_device()});
    const auto of = [&](const std::vector<std::int64_t>& ids) {
      return embedding(at::tensor(ids, at::kLong)
                           .reshape({1, static_cast<std::int64_t>(ids.size())})
                           .to(test_device()));
    };
    EXPECT_EQ(local(of({})).sizes(), (at::IntArrayRef{1, 0, 3}));
    for (const std::int64_t wrong : {-1, 7})
      expect_parts(error_of([&] { of({wrong}); }, ErrorKind::data),
                   {"token " + std::to_string(wrong), "vocabulary of 7", "tokenizer"});
  });
}

}  // namespace
}  // namespace moesh
