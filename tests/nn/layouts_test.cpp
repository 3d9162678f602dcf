// The layouts which nn declares and does not derive (the list in tests/layers_test.py), each
// against one rank, values and gradients. A layout that is not true is found: each test declares
// one, too.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "moesh/comm/stream.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/experts.h"
#include "moesh/nn/router.h"
#include "moesh/nn/vocabulary.h"
#include "tests/spmd/device.h"
#include "tests/spmd/layout_check.h"
#include "tests/support.h"

namespace moesh::nn {
namespace {

using enum Place;

const Init kInit{.kind = Init::Distribution::normal, .scale = 0.5, .seed = 5};
const std::vector<MeshShape> kMeshes{
    {.tp = 2}, {.cp = 2}, {.dp_shard = 2}, {.dp_shard = 2, .cp = 2, .tp = 2}};

template <class Fn>
void on_mesh(const MeshShape& shape, Fn f) {
  // Ranks read what this thread has computed, and have streams of their own.
  if (const at::Device d = test_device(); !d.is_cpu())
    c10::impl::VirtualGuardImpl(d.type()).synchronizeDevice(comm::existing_device(d).index());
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        f(mesh);
      },
      test_options());
}
template <class Fn>
auto on_one_rank(Fn f) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  return f(mesh);
}

at::Tensor random(at::IntArrayRef shape) {
  return at::randn(shape, at::TensorOptions(at::kDouble).device(test_device()));
}

// One sequence for each dp rank: this rank's, and its span of it.
at::Tensor my_tokens(const at::Tensor& x_BL, const Mesh& mesh, const Tokens& tokens) {
  return tokens.my_span(x_BL.narrow(0, mesh.coordinate(dp), 1));
}

TEST(Layouts, AnEmbeddingIsAPartialSum) {
  constexpr std::int64_t V = 7, D = 3, L = 5;
  const auto embed = [](const Mesh& mesh, const at::Tensor& ids_BL) {
    const Embedding embedding("embed", V, D,
                              {.dtype = at::kDouble, .device = test_device(), .init = kInit});
    const Tokens tokens(mesh, ids_BL.size(0) / mesh.size(dp), L, true);
    return embedding(my_tokens(ids_BL, mesh, tokens));
  };
  for (const auto& shape : kMeshes) {
    const std::int64_t B = shape.dp_shard;
    const at::Tensor ids = at::arange(B * L).remainder(V).reshape({B, L}).to(test_device());
    const at::Tensor alone = at::cat(on_one_rank([&](const Mesh& mesh) {
      std::vector<at::Tensor> sequences;
      for (std::int64_t b = 0; b < B; ++b)
        sequences.push_back(local(embed(mesh, ids.narrow(0, b, 1))).detach());
      return sequences;
    }));
    on_mesh(shape, [&](const Mesh& mesh) {
      const auto y = embed(mesh, ids);
      EXPECT_EQ(layout_complaint(mesh, y, {0, 1, 0}, alone), "") << shape.describe();
      const auto as_whole = assume<Dense{T, T, R}>(local(y));
      EXPECT_EQ(layout_complaint(mesh, as_whole, {0, 1, 0}, alone) == "", shape.tp == 1);
    });
  }
}

TEST(Layouts, ALossOfTheVocabularyIsTheSameOnTp) {
  constexpr std::int64_t V = 7, L = 5, D = 3;
  for (const auto& shape : kMeshes) {
    const std::int64_t B = shape.dp_shard;
    const at::Tensor states = random({B, L, D}), weight = random({V, D});
    const at::Tensor labels = at::arange(B * L).remainder(V).reshape({B, L}).to(test_device());
    const at::Tensor leaf = states.flatten(0, 1).clone().requires_grad_(true),
                     words_leaf = weight.clone().requires_grad_(true);
    const at::Tensor alone =
        at::cross_entropy_loss(leaf.mm(words_leaf.t()), labels.flatten(), {}, at::Reduction::Sum);
    alone.backward();
    on_mesh(shape, [&](const Mesh& mesh) {
      const Tokens tokens(mesh, 1, L, true);
      const Pieces words{V, mesh.size(tp)};
      const auto x = as_leaf(assume<Dense{T, T, R}>(my_tokens(states, mesh, tokens).flatten(0, 1)));
      const auto w = as_leaf(assume<Dense{R, R, F}>(
          weight.narrow(0, words.start(mesh.coordinate(tp)), words.length(mesh.coordinate(tp)))));
      const auto y = cross_entropy(x, w, my_tokens(labels, mesh, tokens).flatten(), V);
      EXPECT_EQ(layout_complaint(mesh, y, {}, alone.detach()), "") << shape.describe();
      backward(y);
      EXPECT_EQ(layout_complaint(mesh, grad(x), {0, 0, 0}, leaf.grad()), "") << shape.describe();
      EXPECT_EQ(layout_complaint(mesh, grad(w), {0, 0, 0}, words_leaf.grad()), "")
          << shape.describe();
      const auto as_sum = assume<Dense{P, P, P}>(local(y));
      EXPECT_EQ(layout_complaint(mesh, as_sum, {}, alone.detach()) == "", shape.tp == 1);
    });
  }
}

// More ranks than words, and words with the same logit: the first of them.
TEST(Layouts, TheBestWordIsThatOfTheWholeVocabulary) {
  constexpr std::int64_t L = 5, D = 3;
  for (const auto& shape : kMeshes)
    for (const std::int64_t V : {7, 1}) {
      const std::int64_t B = shape.dp_shard;
      const at::Tensor states = random({B, L, D}), weight = random({V, D});
      weight[V - 1].copy_(weight[0]);
      const at::Tensor alone = states.flatten(0, 1).mm(weight.t()).argmax(1);
      on_mesh(shape, [&](const Mesh& mesh) {
        const Tokens tokens(mesh, 1, L, true);
        const Pieces words{V, mesh.size(tp)};
        const auto x = assume<Dense{T, T, R}>(my_tokens(states, mesh, tokens).flatten(0, 1));
        const auto w = assume<Dense{R, R, F}>(
            weight.narrow(0, words.start(mesh.coordinate(tp)), words.length(mesh.coordinate(tp))));
        const auto y = best_words(x, w, V);
        EXPECT_EQ(layout_complaint(mesh, y, {0, 0, 0}, alone), "") << shape.describe();
      });
    }
}

// The number of every token, which is where it must be, and the marks of those that count.
TEST(Layouts, OwnTokensAreCutFromWhatCpAndTpHaveWhole) {
  constexpr std::int64_t B = 2, L = 5;
  for (const auto& shape : kMeshes)
    for (const auto& [sp, cut] : {std::pair{true, SequenceCut::contiguous},
                                  {true, SequenceCut::balanced},
                                  {false, SequenceCut::contiguous},
                                  {false, SequenceCut::balanced}}) {
      const std::int64_t S = B * shape.dp_shard;
      const at::Tensor number = at::arange(S * L).reshape({S, L, 1}).to(test_device());
      on_mesh(shape, [&](const Mesh& mesh) {
        const at::Tensor mine = number.narrow(0, mesh.coordinate(dp) * B, B);
        const Tokens tokens(mesh, B, L, sp, cut, mine.squeeze(2).remainder(3).ne(1));
        const at::Tensor ids = tokens.global_ids(test_device()).unsqueeze(1);
        const auto whole = assume<Dense{T, R, R}>(mine);
        EXPECT_EQ(layout_complaint(mesh, whole, {0, 0, 0}, number), "") << shape.describe();
        EXPECT_TRUE(at::equal(local(tokens.own(whole)), ids)) << shape.describe() << sp;
        EXPECT_TRUE(at::equal(local(tokens.valid_N1()), ids.remainder(3).ne(1)));
        const auto as_shards = assume<Dense{T, T, T}>(mine);
        EXPECT_EQ(layout_complaint(mesh, as_shards, {0, 1, 1}, number) == "",
                  shape.cp * shape.tp == 1);
      });
    }
}

// Documents are those of the whole sequence on every cp and tp rank, and a span has its part.
TEST(Layouts, ASpanHasTheDocumentsOfItsTokens) {
  constexpr std::int64_t B = 2, L = 5;
  const auto balanced = SequenceCut::balanced;
  for (const auto& shape : kMeshes) {
    const std::int64_t S = B * shape.dp_shard;
    const at::Tensor position = at::arange(L).expand({S, L}),
                     starts = at::minimum(position, at::arange(S).unsqueeze(1));
    on_mesh(shape, [&](const Mesh& mesh) {
      const auto mine = [&](const at::Tensor& x) {
        return x.narrow(0, mesh.coordinate(dp) * B, B).to(test_device());
      };
      const Tokens tokens(mesh, B, L, true, balanced, {}, {mine(starts), 7});
      ASSERT_TRUE(tokens.has_documents());
      EXPECT_EQ(tokens.most_documents(), 7);
      EXPECT_TRUE(at::equal(local(tokens.document_starts()), tokens.my_span(mine(starts))));
      EXPECT_TRUE(
          at::equal(local(tokens.document_positions()), tokens.my_span(mine(position - starts))));
      const auto wrong = [&](const at::Tensor& x) {
        return error_of([&] { Tokens(mesh, B, L, true, balanced, {}, {x, 7}); }, ErrorKind::config);
      };
      expect_parts(wrong(mine(starts).to(at::kInt)), {"documents begin", "Int", "Long [2, 5]"});
      expect_parts(wrong(mine(starts).narrow(1, 0, 4)), {"[2, 4]", "Long [2, 5]"});
    });
  }
}

// A router on all tokens of B sequences, and its input as a leaf.
struct Routed {
  Router router;
  PerToken x_ND;
  Tokens tokens;
  Route route;

  Routed(const Mesh& mesh, const at::Tensor& x_BLD)
      : router({.num_experts = 6, .top_k = 2}, "gate", x_BLD.size(2),
               {.dtype = at::kDouble, .device = test_device(), .init = kInit}),
        tokens(mesh, x_BLD.size(0) / mesh.size(dp), x_BLD.size(1), true) {
    const at::Tensor mine =
        tokens.mine(x_BLD.narrow(0, mesh.coordinate(dp) * tokens.batch(), tokens.batch()));
    x_ND = as_leaf(assume<Dense{T, T, T}>(mine.flatten(0, 1)));
    route = router.choose(x_ND, tokens);
  }
};

TEST(Layouts, PendingCountsAreAPartialSum) {
  for (const auto& shape : kMeshes) {
    const at::Tensor x = random({shape.dp_shard, 5, 4});
    const at::Tensor alone = on_one_rank(
        [&](const Mesh& mesh) { return local(Routed(mesh, x).router.pending_counts()); });
    on_mesh(shape, [&](const Mesh& mesh) {
      Routed r(mesh, x);
      const TokenSum mine = r.router.pending_counts();
      EXPECT_EQ(layout_complaint(mesh, mine, {}, alone), "");
      const auto without_cp = assume<Dense{P, I, P}>(local(mine));
      EXPECT_EQ(layout_complaint(mesh, without_cp, {}, alone) == "", shape.cp == 1);
      // As a checkpoint gives them back: to all ranks, and they count once.
      r.router.set_pending_counts(all_reduce<kTokenAxes>(mine));
      EXPECT_EQ(layout_complaint(mesh, r.router.pending_counts(), {}, alone), "");
    });
  }
}

TEST(Layouts, SumsOfASequenceArePartialOnCpAndTp) {
  const auto loss_of = [](const Routed& r) {
    return balance_loss(r.route, r.router.config(), r.tokens, at::full({}, 10, at::kDouble),
                        BalanceOver::sequence);
  };
  for (const auto& shape : kMeshes) {
    const at::Tensor x = random({shape.dp_shard, 5, 4});
    at::Tensor loss, d_x;
    on_one_rank([&](const Mesh& mesh) {
      const Routed r(mesh, x);
      const auto sum = loss_of(r);
      backward(sum);
      loss = local(sum).detach(), d_x = local(grad(r.x_ND));
      return 0;
    });
    on_mesh(shape, [&](const Mesh& mesh) {
      const Routed r(mesh, x);
      const auto sum = loss_of(r);
      EXPECT_EQ(layout_complaint(mesh, sum, {}, loss), "") << shape.describe();
      backward(sum);
      EXPECT_EQ(layout_complaint(mesh, grad(r.x_ND), {0, 0, 0}, d_x), "") << shape.describe();
      EXPECT_NE(layout_complaint(mesh, assume<Dense{I, I, I}>(local(sum)), {}, loss), "");
    });
  }
}

TEST(Layouts, LogitsAreThoseOfEachToken) {
  constexpr std::int64_t L = 5, D = 4, kExperts = 6;
  const auto run = [&](const Mesh& mesh, const at::Tensor& x_BLD, const auto& gate) {
    const Tokens tokens(mesh, 1, L, true);
    const at::Tensor mine = tokens.mine(x_BLD.narrow(0, mesh.coordinate(dp), 1)).flatten(0, 1);
    return gate_logits(assume<Dense{T, T, T}>(mine), gate);
  };
  for (const auto& shape : kMeshes) {
    const at::Tensor x = random({shape.dp_shard, L, D}), gate = random({kExperts, D});
    const at::Tensor leaf = gate.clone().requires_grad_(true);
    const at::Tensor alone = x.flatten(0, 1).mm(leaf.t());
    alone.square().sum().backward();
    on_mesh(shape, [&](const Mesh& mesh) {
      const auto mine = as_leaf(assume<Dense{R, R, R}>(gate));
      const auto logits = run(mesh, x, mine);
      EXPECT_EQ(layout_complaint(mesh, logits, {0, 0, 0}, alone.detach()), "") << shape.describe();
      backward(sum_all(square(logits)));
      EXPECT_EQ(layout_complaint(mesh, grad(mine), {}, leaf.grad()), "") << shape.describe();
      const auto as_whole = assume<Dense{R, R, R}>(local(grad(mine)));
      EXPECT_NE(layout_complaint(mesh, as_whole, {}, leaf.grad()), "");
    });
  }
}

TEST(Layouts, ExpertsGivePartialSums) {
  constexpr std::int64_t N = 5, D = 4, kExperts = 4, K = 2;
  const at::Tensor x = random({N, D}), scores = random({N, K});
  const at::Tensor chosen =
      at::arange(N * K).mul(3).remainder(kExperts).reshape({N, K}).to(test_device());
  const auto run = [&](const Tensor<Sparse{T, R, R}>& rows) {
    const Experts experts({.num_experts = kExperts, .dim = D, .ffn = 6, .biases = true}, "experts",
                          {.dtype = at::kDouble, .device = test_device(), .init = kInit});
    return experts.apply_to_tokens(rows, assume<Sparse{T, R, R}>(scores), chosen);
  };
  at::Tensor alone, d_x;
  on_one_rank([&](const Mesh&) {
    const auto leaf = as_leaf(assume<Sparse{T, R, R}>(x));
    const auto y = run(leaf);
    backward(sum_all(y));
    alone = local(y).detach(), d_x = local(grad(leaf));
    return 0;
  });
  for (const auto& shape : {MeshShape{.tp = 2, .ep = 2}, MeshShape{.tp = 2, .etp = 2},
                            MeshShape{.tp = 4, .ep = 2, .etp = 2}})
    on_mesh(shape, [&](const Mesh& mesh) {
      const auto leaf = as_leaf(assume<Sparse{T, R, R}>(x));
      const auto y = run(leaf);
      EXPECT_EQ(layout_complaint(mesh, y, {0, 0, 0}, alone), "") << shape.describe();
      backward(sum_all(y));
      EXPECT_EQ(layout_complaint(mesh, grad(leaf), {0, 0, 0}, d_x), "") << shape.describe();
      EXPECT_NE(layout_complaint(mesh, assume<Sparse{T, R, R}>(local(y)), {0, 0, 0}, alone), "");
    });
}

TEST(Layouts, AnMlpIsAPartialSum) {
  constexpr std::int64_t L = 5, D = 4, kHidden = 6;
  const auto run = [&](const Mesh& mesh, const at::Tensor& x_BLD, Mlp& mlp) {
    const Tokens tokens(mesh, 1, L, true);
    const auto x = as_leaf(assume<Dense{T, T, R}>(my_tokens(x_BLD, mesh, tokens)));
    return std::pair(x, mlp(x));
  };
  const auto some_lora = [](const std::string&) {
    return std::optional<LoraConfig>({.rank = 2, .scale = 0.5, .zero_b = false});
  };
  const auto check = [&](const MeshShape& shape, bool has_lora) {
    ModuleOptions options{.dtype = at::kDouble, .device = test_device(), .init = kInit};
    if (has_lora) options.lora = some_lora;
    const at::Tensor x = random({shape.dp_shard, L, D});
    const at::Tensor leaf = x.clone().requires_grad_(true);
    at::Tensor alone;  // by LibTorch's own operations
    on_one_rank([&](const Mesh&) {
      Mlp mlp("mlp", D, kHidden, options);
      std::vector<at::Tensor> w;
      mlp.each_param([&](auto& p) { w.push_back(p.stored().value.detach()); });
      const auto layer = [&](const at::Tensor& in, size_t i) {
        if (!has_lora) return at::linear(in, w[i]);
        const at::Tensor added = at::linear(at::linear(in, w[3 * i + 1]), w[3 * i + 2]);
        return at::linear(in, w[3 * i]) + 0.5 * added;
      };
      alone = layer(at::silu(layer(leaf, 0)) * layer(leaf, 1), 2);
      alone.square().sum().backward();
      return 0;
    });
    on_mesh(shape, [&](const Mesh& mesh) {
      Mlp mlp("mlp", D, kHidden, options);
      const auto [in, y] = run(mesh, x, mlp);
      EXPECT_EQ(layout_complaint(mesh, y, {0, 1, 0}, alone.detach()), "") << shape.describe();
      backward(sum_all(square(all_reduce<tp, I>(y))));
      EXPECT_EQ(layout_complaint(mesh, grad(in), {0, 1, 0}, leaf.grad()), "") << shape.describe();
      const auto as_whole = assume<Dense{T, T, R}>(local(y));
      EXPECT_EQ(layout_complaint(mesh, as_whole, {0, 1, 0}, alone.detach()) == "", shape.tp == 1);
    });
  };
  for (const auto& shape : kMeshes)
    for (const bool has_lora : {false, true}) check(shape, has_lora);
}

// FSDP divides the experts where there is one for every rank that has others, and else their
// features: no rank is left without a part.
TEST(Layouts, ExpertsAreStoredInEqualParts) {
  struct Case {
    MeshShape mesh;
    std::int64_t experts;
    std::vector<std::int64_t> part;  // of w1 [experts, 12, 6]
  };
  const MeshShape six{.dp_shard = 6, .ep = 2}, replicas{.dp_replicate = 2, .dp_shard = 2};
  for (const auto& [shape, experts, part] :
       {Case{six, 6, {1, 12, 6}}, Case{six, 4, {2, 4, 6}}, Case{six, 2, {1, 4, 6}},
        Case{replicas, 2, {1, 12, 6}}})
    on_mesh(shape, [&](const Mesh& mesh) {
      Experts all({.num_experts = experts, .dim = 6, .ffn = 12}, "experts",
                  {.dtype = at::kDouble, .device = test_device(), .init = kInit});
      bool is_first = true;  // w1
      all.each_param([&](auto& w) {
        if (is_first) EXPECT_EQ(w.stored().value.sizes().vec(), part) << experts << " experts";
        is_first = false;
        EXPECT_EQ(w.stored().value.numel() * mesh.size(dp_shard), experts * 6 * 12) << w.name();
      });
    });
}

}  // namespace
}  // namespace moesh::nn
