#include "moesh/nn/vocabulary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>

#include "moesh/spmd/spmd.h"
#include "moesh/types/token.h"
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
        at::Tensor dx = at::zeros_like(x), dw = at::full_like(w, NAN);
        std::mutex mutex;
        over_vocabulary(ranks, vocab, [&](std::int64_t start, std::int64_t length) {
          const auto leaf = [](const at::Tensor& t) {
            return t.detach().clone().to(test_device()).requires_grad_(true);
          };
          const at::Tensor mine = leaf(x), words = leaf(w.narrow(0, start, length));
          const auto loss =
              nn::cross_entropy(assume<Dense{T, T, R}>(mine), assume<Dense{R, R, F}>(words),
                                labels.to(test_device()), vocab, chunk);
          EXPECT_NEAR(local(loss).item<double>(), expected.item<double>(), 1e-10)
              << vocab << " words on " << ranks << " in chunks of " << chunk;
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
  const Init init{.kind = Init::Kind::normal, .seed = 4};
  at::Tensor table, expected, expected_gradient;
  for (int ranks : {1, 2, 4, 8}) {
    at::Tensor gradient = at::full({vocab, dim}, NAN, at::kDouble),
               sum = at::zeros({2, 3, dim}, at::kDouble);
    std::mutex mutex;
    over_vocabulary(ranks, vocab, [&](std::int64_t start, std::int64_t length) {
      const nn::Embedding embedding("words", vocab, dim, at::kDouble, test_device(), init);
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

}  // namespace
}  // namespace moesh
