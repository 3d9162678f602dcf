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

TEST(CrossEntropy, IsLibTorchsOnEveryCutOfTheVocabulary) {
  at::manual_seed(1);
  const std::int64_t tokens = 6;
  for (std::int64_t vocab : {1, 5, 7, 16})
    for (int ranks : {1, 2, 3, 4, 8}) {  // also more ranks than words
      const at::Tensor logits = at::randn({tokens, vocab}, at::kDouble) * 30;
      at::Tensor labels = at::randint(vocab, {tokens}, at::kLong);
      labels[1] = -100, labels[4] = -100;
      const at::Tensor weights = at::randn({tokens}, at::kDouble);

      const at::Tensor leaf = logits.clone().requires_grad_(true);
      const at::Tensor expected =
          at::cross_entropy_loss(leaf, labels, {}, at::Reduction::None, -100);
      (expected * weights).sum().backward();

      at::Tensor gradient = at::full_like(logits, NAN);
      over_vocabulary(ranks, vocab, [&](std::int64_t start, std::int64_t length) {
        const at::Tensor mine =
            logits.narrow(1, start, length).clone().to(test_device()).requires_grad_(true);
        const auto loss =
            nn::cross_entropy(assume<Dense{T, T, F}>(mine), labels.to(test_device()), vocab);
        EXPECT_TRUE(at::allclose(local(loss).detach().cpu(), expected, 1e-12, 1e-12))
            << vocab << " words on " << ranks;
        backward(once<tp>(sum_all(loss * assume<Dense{T, T, I}>(weights.to(test_device())))));
        gradient.narrow(1, start, length).copy_(mine.grad());  // no two ranks share a word
      });
      EXPECT_TRUE(at::allclose(gradient, leaf.grad(), 1e-10, 1e-12))
          << vocab << " words on " << ranks;
    }
}

TEST(CrossEntropy, RefusesALabelOutsideOfTheVocabulary) {
  expect_parts(
      error_of(
          [] {
            over_vocabulary(2, 6, [](std::int64_t, std::int64_t length) {
              const auto logits = assume<Dense{T, T, F}>(at::zeros({1, length}, test_device()));
              nn::cross_entropy(
                  logits, at::full({1}, 6, at::TensorOptions(test_device()).dtype(at::kLong)), 6);
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
