#include "moesh/nn/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "moesh/fsdp/fsdp.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/nn/attention_functions.h"
#include "moesh/nn/grouped_attention.h"
#include "tests/comm/trace.h"
#include "tests/nn/documents.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh {
namespace {

using enum Place;
using nn::AttentionOptions;
using nn::Tokens;

constexpr Dense kHeads{T, T, F};

// The formula, number by number: q, k, v [B, L, heads, d], sinks [heads] or undefined, starts of
// documents [B, L] or undefined.
at::Tensor formula(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& sinks, const AttentionOptions& o,
                   const at::Tensor& starts = {}) {
  const auto batch = q.size(0), length = q.size(1), heads = q.size(2),
             per_group = heads / k.size(2);
  at::Tensor out = at::zeros({batch, length, heads, v.size(3)}, at::kDouble);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < length; ++i) {
        double sum = sinks.defined() ? std::exp(sinks[h].item<double>()) : 0;
        const auto start = starts.defined() ? starts[b][i].item<std::int64_t>() : 0;
        for (std::int64_t j = start; j <= i; ++j) {
          if (o.window > 0 && i - j >= o.window) continue;
          if (o.chunk > 0 && (i - start) / o.chunk != (j - start) / o.chunk) continue;
          const double weight =
              std::exp(o.scale * q[b][i][h].dot(k[b][j][h / per_group]).item<double>());
          sum += weight;
          out[b][i][h] += weight * v[b][j][h / per_group];
        }
        out[b][i][h] /= sum;
      }
  return out;
}

struct Inputs {
  at::Tensor q, k, v, sinks;  // [B, L, heads, d]
};

Inputs make_inputs(std::int64_t batch, std::int64_t length, std::int64_t heads, std::int64_t groups,
                   std::int64_t value_width = 4) {
  at::manual_seed(5);
  return {at::randn({batch, length, heads, 6}, at::kDouble),
          at::randn({batch, length, groups, 6}, at::kDouble),
          at::randn({batch, length, groups, value_width}, at::kDouble),
          at::randn({heads}, at::kDouble)};
}

struct Outputs {
  at::Tensor y, dq, dk, dv, dsinks;
};

// On a mesh of cp x tp: each rank gives what it has, and the whole is put together here.
Outputs on_mesh(const Inputs& in, const AttentionOptions& o, bool with_sinks,
                const MeshShape& shape, const at::Tensor& starts = {},
                SequenceCut cut = SequenceCut::contiguous) {
  const auto batch = in.q.size(0), length = in.q.size(1);
  Outputs out{at::zeros({batch, length, in.q.size(2), in.v.size(3)}, at::kDouble),
              at::zeros_like(in.q), at::zeros_like(in.k), at::zeros_like(in.v),
              at::zeros_like(in.sinks)};
  std::mutex mutex;
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        nn::Documents documents;
        if (starts.defined()) documents = {starts.to(test_device()), batch * length};
        const Tokens tokens(mesh, batch, length, true, cut, {}, documents);
        const auto part = [&](const at::Tensor& x) {
          const auto n = x.size(2) / mesh.size(tp);
          return tokens.my_span(x).narrow(2, mesh.coordinate(tp) * n, n);
        };
        // What a rank has, into the whole.
        const auto put = [&](const at::Tensor& whole, const at::Tensor& mine) {
          const auto n = whole.size(2) / mesh.size(tp);
          whole.narrow(2, mesh.coordinate(tp) * n, n)
              .index_copy_(1, nn::as_tensor(tokens.span_ranges(), at::kLong), mine.cpu());
        };
        const auto leaf = [&](const at::Tensor& x) {
          return x.clone().to(test_device()).requires_grad_(true);
        };
        const at::Tensor q = leaf(part(in.q)), k = leaf(part(in.k)), v = leaf(part(in.v));
        const auto num_sinks = in.sinks.numel() / mesh.size(tp);
        const at::Tensor sinks =
            leaf(in.sinks.narrow(0, mesh.coordinate(tp) * num_sinks, num_sinks));
        nn::SeenKeys seen(assume<kHeads>(k), assume<kHeads>(v), tokens, o, nullptr);
        const auto y = seen.attend(assume<kHeads>(q),
                                   with_sinks ? assume<Dense{R, R, F}>(sinks) : nn::PerHead());
        // The objective weighs every output by its place, so that no gradient is zero by symmetry.
        const at::Tensor weights =
            part(at::arange(out.y.numel(), at::kDouble).reshape(out.y.sizes()).sin());
        backward(sum_all(y * assume<kHeads>(weights.to(test_device()))));
        const std::lock_guard lock(mutex);
        put(out.y, local(y).detach());
        put(out.dq, q.grad()), put(out.dk, k.grad()), put(out.dv, v.grad());
        // A sink is used by every cp rank: its gradient is the sum.
        if (with_sinks)
          out.dsinks.narrow(0, mesh.coordinate(tp) * num_sinks, num_sinks).add_(sinks.grad().cpu());
      },
      test_options());
  return out;
}

// The same with the formula and autograd's own derivative of it.
Outputs by_formula(const Inputs& in, const AttentionOptions& o, bool with_sinks,
                   const at::Tensor& starts = {}) {
  const auto leaf = [](const at::Tensor& x) { return x.clone().requires_grad_(true); };
  const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v), sinks = leaf(in.sinks);
  // A dense form that autograd can differentiate; its values are compared with the formula first.
  const auto per_group = q.size(2) / k.size(2);
  const at::Tensor keys = k.repeat_interleave(per_group, 2).permute({0, 2, 3, 1});
  at::Tensor scores = q.transpose(1, 2).matmul(keys) * o.scale;
  const at::Tensor i = at::arange(q.size(1)).unsqueeze(1), j = at::arange(q.size(1));
  at::Tensor hidden = j > i;
  if (o.window > 0) hidden = hidden.logical_or(i - j >= o.window);
  const at::Tensor start = starts.defined() ? starts.unsqueeze(1).unsqueeze(3) : at::zeros_like(i);
  const auto chunk_of = [&](const at::Tensor& x) { return (x - start).div(o.chunk, "floor"); };
  if (o.chunk > 0) hidden = hidden.logical_or(chunk_of(i) != chunk_of(j));
  hidden = hidden.logical_or(j < start);
  scores = scores.masked_fill(hidden, -INFINITY);
  if (with_sinks)
    scores =
        at::cat({scores, sinks.reshape({1, -1, 1, 1}).expand({q.size(0), -1, q.size(1), 1})}, -1);
  const at::Tensor p = scores.softmax(-1).narrow(-1, 0, q.size(1));
  const at::Tensor y = p.matmul(v.repeat_interleave(per_group, 2).transpose(1, 2)).transpose(1, 2);
  EXPECT_TRUE(at::allclose(
      y, formula(in.q, in.k, in.v, with_sinks ? in.sinks : at::Tensor(), o, starts), 1e-10, 1e-12));
  (y * at::arange(y.numel(), at::kDouble).reshape(y.sizes()).sin()).sum().backward();
  return {y.detach(), q.grad(), k.grad(), v.grad(),
          with_sinks ? sinks.grad() : at::zeros_like(in.sinks)};
}

void expect_equal(const Outputs& a, const Outputs& b, const std::string& what) {
  const auto check = [&](const char* name, const at::Tensor& x, const at::Tensor& y) {
    EXPECT_TRUE(at::allclose(x, y, 1e-9, 1e-11))
        << what << ": " << name << " differs by " << (x - y).abs().max().item<double>();
  };
  check("y", a.y, b.y), check("d(q)", a.dq, b.dq), check("d(k)", a.dk, b.dk),
      check("d(v)", a.dv, b.dv);
  check("d(sinks)", a.dsinks, b.dsinks);
}

const std::vector<AttentionOptions> kOptions{{.scale = 0.4},
                                             {.scale = 0.4, .window = 3},
                                             {.scale = 0.4, .chunk = 3},
                                             {.scale = 0.4, .window = 1},
                                             {.scale = 0.4, .chunk = 1},
                                             {.scale = 0.4, .window = 2, .chunk = 4},
                                             {.scale = 0.4, .window = 70, .chunk = 70}};

std::string describe(const AttentionOptions& o, bool with_sinks) {
  return "window " + std::to_string(o.window) + ", chunk " + std::to_string(o.chunk) +
         (with_sinks ? ", sinks" : "");
}

const std::vector<SequenceCut> kCuts{SequenceCut::contiguous, SequenceCut::balanced};
std::string describe(SequenceCut cut) { return cut == SequenceCut::balanced ? ", balanced" : ""; }

const std::vector<MeshShape> kMeshes{{},        {.tp = 2},          {.cp = 2},
                                     {.cp = 3}, {.cp = 2, .tp = 2}, {.cp = 8}};

TEST(Attention, IsTheFormulaOnEveryMesh) {
  const auto in = make_inputs(2, 7, 4,
                              2);  // 7 tokens: uneven over 2 and 3 ranks, and fewer than 8 ranks
  for (const AttentionOptions& o : kOptions)
    for (bool with_sinks : {false, true}) {
      const Outputs expected = by_formula(in, o, with_sinks);
      for (const auto& shape : kMeshes)
        for (const SequenceCut cut : kCuts)
          expect_equal(on_mesh(in, o, with_sinks, shape, {}, cut), expected,
                       shape.describe() + ", " + describe(o, with_sinks) + describe(cut));
    }
}

// The same within documents, which begin anywhere, differently in each sequence, and lie on several
// cp ranks; chunks count from where they begin.
TEST(Attention, StaysWithinDocumentsOnEveryMesh) {
  const auto in = make_inputs(3, 7, 4, 2);
  const at::Tensor starts = starts_of({{3, 4}, {1, 1, 4, 1}, {7}});
  for (const AttentionOptions& o : kOptions)
    for (bool with_sinks : {false, true}) {
      const Outputs expected = by_formula(in, o, with_sinks, starts);
      for (const auto& shape : kMeshes)
        for (const SequenceCut cut : kCuts)
          expect_equal(
              on_mesh(in, o, with_sinks, shape, starts, cut), expected,
              shape.describe() + ", documents, " + describe(o, with_sinks) + describe(cut));
    }
}

// More queries than a block of the kernel of the CPU, and more keys than a panel.
TEST(Attention, StaysWithinLongDocuments) {
  const auto in = make_inputs(2, 150, 2, 1);
  const at::Tensor starts = starts_of({{5, 60, 1, 70, 14}, {129, 21}});
  for (const AttentionOptions& o : {AttentionOptions{.scale = 0.4},
                                    {.scale = 0.4, .window = 20},
                                    {.scale = 0.4, .chunk = 33}}) {
    const Outputs expected = by_formula(in, o, true, starts);
    for (const MeshShape& shape : {MeshShape{}, {.cp = 2}})
      for (const SequenceCut cut : kCuts)
        expect_equal(on_mesh(in, o, true, shape, starts, cut), expected,
                     shape.describe() + ", " + describe(o, true) + describe(cut));
  }
}

// Between cp ranks travels what the queries see: all of it, or the window, or the chunk. In bytes
// that each of 4 ranks puts into messages of forward and of backward, keys and values together.
TEST(Attention, SendsWhatQueriesSee) {
  SequenceCut cut = SequenceCut::contiguous;
  const auto sent = [&](const AttentionOptions& o, int rank, bool in_backward,
                        std::int64_t length) {
    std::int64_t sum = 0;
    comm::launch(
        4,
        [&](comm::Group& world) {
          const Mesh mesh(world, {.cp = 4});
          const MeshScope scope(mesh);
          const Tokens tokens(mesh, 2, length, true, cut);
          const auto heads = [&] {
            return as_leaf(
                assume<kHeads>(at::randn({2, tokens.span_length(), 3, 5},
                                         at::TensorOptions(at::kDouble).device(test_device()))));
          };
          const auto q = heads(), k = heads(), v = heads();
          const comm::Trace forward;
          const auto y = nn::attend(q, nn::start_seen_positions(k, tokens, o).wait(),
                                    nn::start_seen_positions(v, tokens, o).wait(), {}, tokens, o);
          const comm::Trace backward_trace;
          if (in_backward) local(y).sum().backward();
          if (world.rank() == rank)
            for (const auto& e : (in_backward ? backward_trace : forward).entries()) sum += e.bytes;
        },
        test_options());
    constexpr std::int64_t kPosition = 2 * (2 * 3 * 5) * 8;  // keys and values of 2 sequences
    EXPECT_EQ(sum % kPosition, 0);
    return sum / kPosition;
  };
  using Positions = std::vector<std::int64_t>;
  // 16 tokens are 4 a rank.
  const auto of_all = [&](const AttentionOptions& o, bool in_backward, std::int64_t length = 16) {
    Positions all;
    for (int r = 0; r < 4; ++r) all.push_back(sent(o, r, in_backward, length));
    return all;
  };
  EXPECT_EQ(of_all({}, false), (Positions{4, 4, 4, 4})) << "its own, to all";
  EXPECT_EQ(of_all({}, true), (Positions{16, 16, 16, 16}));
  EXPECT_EQ(of_all({.window = 3}, false), (Positions{2, 2, 2, 0})) << "its last two, to the next";
  EXPECT_EQ(of_all({.window = 3}, true), (Positions{0, 2, 2, 2}));
  EXPECT_EQ(of_all({.window = 6}, false), (Positions{5, 5, 4, 0})) << "four, and one to the next";
  EXPECT_EQ(of_all({.chunk = 8}, false), (Positions{4, 0, 4, 0})) << "to the rank of its chunk";
  EXPECT_EQ(of_all({.chunk = 4}, false), (Positions{0, 0, 0, 0})) << "a chunk a rank: nothing";
  EXPECT_EQ(of_all({.window = 1}, false), (Positions{0, 0, 0, 0}));
  EXPECT_EQ(of_all({.chunk = 1}, false), (Positions{0, 0, 0, 0}));
  EXPECT_EQ(of_all({.window = 16}, false), of_all({}, false)) << "all of it: one gather";
  EXPECT_EQ(of_all({.chunk = 16}, false), of_all({}, false));
  EXPECT_EQ(of_all({.window = 2}, false, 3), (Positions{1, 1, 0, 0})) << "none to whom has none";
  // Ranks have 0, 1 and 14, 15; 2, 3 and 12, 13; and so on, to 6 to 9.
  cut = SequenceCut::balanced;
  EXPECT_EQ(of_all({}, false), (Positions{4, 4, 4, 4})) << "its own, to all";
  EXPECT_EQ(of_all({}, true), (Positions{16, 16, 16, 16}));
  EXPECT_EQ(of_all({.window = 2}, false), (Positions{1, 2, 2, 1})) << "before each of two ranges";
  EXPECT_EQ(of_all({.window = 2}, true), (Positions{1, 2, 2, 1}));
  EXPECT_EQ(of_all({.chunk = 2}, false), (Positions{0, 0, 0, 0}));
  EXPECT_EQ(of_all({.chunk = 4}, false), (Positions{2, 2, 2, 2})) << "half a chunk, to its end";
}

// Half of the key heads travels while attention of the other half computes: both are begun before
// the first is awaited, and in backward the gradients of the second before those of the first.
TEST(Attention, AwaitsTheKeysOfHalfTheHeadsAtATime) {
  struct Order final : comm::ThreadObserver {
    void called(const comm::Operation& o) override {
      if (o.group.name() == "cp") mine.insert(o.number), events += 'b';
    }
    void waits(std::int64_t number) override {
      if (mine.contains(number)) events += 'w';
    }
    std::set<std::int64_t> mine;
    std::string events;
  };
  comm::launch(
      2,
      [&](comm::Group& world) {
        const Mesh mesh(world, {.cp = 2});
        const MeshScope scope(mesh);
        const Tokens tokens(mesh, 1, 8, true, SequenceCut::balanced);
        for (const std::int64_t heads : {2, 3}) {
          const auto leaf = [&] {
            return as_leaf(
                assume<kHeads>(at::randn({1, tokens.span_length(), heads, 4},
                                         at::TensorOptions(at::kDouble).device(test_device()))));
          };
          const auto q = leaf(), k = leaf(), v = leaf();
          Order forward;
          nn::SeenKeys seen(k, v, tokens, {}, nullptr);
          EXPECT_EQ(forward.events, heads == 2 ? "bbbb" : "bb");
          const auto y = seen.attend(q, {});
          EXPECT_EQ(forward.events, heads == 2 ? "bbbbwwww" : "bbww");
          forward.events.clear();
          local(y).sum().backward();
          EXPECT_EQ(forward.events, heads == 2 ? "bbbbwwww" : "bbww");
        }
      },
      test_options());
}

// A rank's queries and the keys they see, one by one: what a kernel computes for it.
TEST(Attention, OfABalancedCutIsAsMuchWorkOnEveryRank) {
  const auto work = [](int num_cp, std::int64_t length, const AttentionOptions& o,
                       SequenceCut cut) {
    std::vector<double> all;
    for (int c = 0; c < num_cp; ++c) {
      double sum = 0;
      const SequenceShard shard(1, length, num_cp, c, 1, cut);
      for (std::int64_t i = 0; i < shard.length(); ++i) {
        const std::int64_t position = position_at(shard.ranges(), i);
        for (std::int64_t key = 0; key <= position; ++key) {
          if (o.window > 0 && position - key >= o.window) continue;
          if (o.chunk > 0 && position / o.chunk != key / o.chunk) continue;
          ++sum;
        }
      }
      all.push_back(sum);
    }
    return all;
  };
  const auto share = [](const std::vector<double>& all) {
    double sum = 0;
    for (const double x : all) sum += x;
    return *std::ranges::max_element(all) * static_cast<double>(all.size()) / sum;
  };
  for (const int num_cp : {2, 3, 4, 8})
    for (const std::int64_t length : {511, 600})
      for (const AttentionOptions& o :
           {AttentionOptions{}, {.window = 40}, {.chunk = 150}, {.window = 30, .chunk = 100}})
        for (const SequenceCut cut : kCuts) {
          const auto counted = work(num_cp, length, o, cut);
          EXPECT_NEAR(nn::longest_share(o, length, num_cp, cut), share(counted), 1e-9)
              << num_cp << ", " << length << describe(cut);
          for (int c = 0; c < num_cp; ++c) {
            double sum = 0;
            for (const PositionRange& r : SequenceShard(1, length, num_cp, c, 1, cut).ranges())
              sum += nn::num_visible(r, o);
            EXPECT_EQ(sum, counted[static_cast<size_t>(c)]);
          }
          if (o.window == 0 && o.chunk == 0 && cut == SequenceCut::balanced) {
            EXPECT_LT(share(counted), 1.05) << num_cp << ", " << length;
          }
        }
  EXPECT_NEAR(nn::longest_share({}, 4096, 8, SequenceCut::contiguous), 15.0 / 8, 1e-3);
  EXPECT_NEAR(nn::longest_share({}, 4096, 8, SequenceCut::balanced), 1, 1e-3);
  EXPECT_EQ(nn::longest_share({}, 0, 2, SequenceCut::balanced), 1);
}

// A window or a chunk that a rank's piece has several of leaves nothing to gain.
TEST(Attention, IsCutAsLayersWant) {
  using Layers = std::vector<std::optional<AttentionOptions>>;
  const AttentionOptions all{}, window{.window = 128}, chunk{.chunk = 1024},
      long_chunk{.chunk = 8192};
  EXPECT_EQ(nn::cheaper_cut(Layers{all}, 8192, 4), SequenceCut::balanced);
  EXPECT_EQ(nn::cheaper_cut(Layers{window}, 8192, 4), SequenceCut::contiguous);
  EXPECT_EQ(nn::cheaper_cut(Layers{chunk}, 8192, 4), SequenceCut::contiguous);
  EXPECT_EQ(nn::cheaper_cut(Layers{long_chunk}, 8192, 4), SequenceCut::balanced);
  EXPECT_EQ(nn::cheaper_cut(Layers{window, all}, 8192, 4), SequenceCut::balanced);
  EXPECT_EQ(nn::cheaper_cut(Layers{chunk, chunk, chunk, all}, 8192, 4), SequenceCut::balanced);
  EXPECT_EQ(nn::cheaper_cut(Layers{all}, 8192, 1), SequenceCut::contiguous);
  EXPECT_EQ(nn::cheaper_cut(Layers{std::nullopt}, 8192, 4), SequenceCut::contiguous);
}

// The form for devices without a kernel of ours, here on any device; with all queries, and with
// those of a second cp rank.
void compare_composed(const Inputs& in, const at::Tensor& starts = {}) {
  const auto of = [&](std::int64_t first, std::int64_t num) {
    return starts.defined() ? starts.narrow(1, first, num).contiguous().to(test_device()) : starts;
  };
  for (const AttentionOptions& o : kOptions)
    for (bool with_sinks : {false, true}) {
      const Outputs expected = by_formula(in, o, with_sinks, starts);
      const auto leaf = [](const at::Tensor& x) {
        return x.clone().to(test_device()).requires_grad_(true);
      };
      const at::Tensor q = leaf(in.q), k = leaf(in.k), v = leaf(in.v), sinks = leaf(in.sinks);
      const at::Tensor given = with_sinks ? sinks : at::Tensor();
      at::Tensor y = nn::composed_attention(
          {.scale = o.scale, .window = o.window, .chunk = o.chunk}, {q, k, v, given, of(0, 7)});
      (y * at::arange(y.numel(), at::kDouble).reshape(y.sizes()).sin().to(test_device()))
          .sum()
          .backward();
      expect_equal({y.detach().cpu(), q.grad().cpu(), k.grad().cpu(), v.grad().cpu(),
                    with_sinks ? sinks.grad().cpu() : at::zeros_like(in.sinks)},
                   expected, describe(o, with_sinks));
      y = nn::composed_attention(
          {.scale = o.scale, .start = 4, .window = o.window, .chunk = o.chunk},
          {q.narrow(1, 4, 3), k, v, given, of(4, 3)});
      EXPECT_TRUE(at::allclose(y.detach().cpu(), expected.y.narrow(1, 4, 3), 1e-9, 1e-11))
          << describe(o, with_sinks);
    }
}

TEST(ComposedAttention, IsTheFormula) { compare_composed(make_inputs(2, 7, 4, 2)); }
TEST(ComposedAttention, IsTheFormulaWithOneKeyHead) { compare_composed(make_inputs(1, 7, 3, 1)); }
TEST(ComposedAttention, IsTheFormulaWithinDocuments) {
  compare_composed(make_inputs(2, 7, 4, 2), starts_of({{3, 4}, {1, 1, 4, 1}}));
}
// Each entry by itself, with the last query at the last key: what the kernel of a GPU computes of
// them is attention within documents. With all queries, and with those of a later cp rank, whose
// first document begins before them, among the keys or before.
TEST(FlashAttention, HasTheBoundariesOfDocuments) {
  const auto in = make_inputs(3, 7, 2, 1);
  const at::Tensor starts = starts_of({{3, 4}, {1, 1, 4, 1}, {7}});
  constexpr std::int64_t kMost = 11;
  for (const std::int64_t first_key : {0, 1, 2, 4})
    for (std::int64_t first = first_key; first < 7; ++first)
      for (std::int64_t end = first + 1; end <= 7; ++end) {
        const std::int64_t length = end - first, num_keys = end - first_key;
        const auto part = [](const at::Tensor& x, std::int64_t from, std::int64_t num) {
          return x.narrow(1, from, num).contiguous();
        };
        const at::Tensor q = part(in.q, first, length), k = part(in.k, first_key, num_keys),
                         v = part(in.v, first_key, num_keys),
                         at_keys = part(starts, first, length) - first_key;
        const kernels::AttentionConfig c{
            .scale = 0.4, .start = first - first_key, .most_documents = kMost};
        const auto b = nn::document_boundaries(c, at_keys);
        ASSERT_EQ(b.queries.numel(), kMost + 3 + 1);
        ASSERT_EQ(b.keys.numel(), kMost + 3 + 1);
        EXPECT_EQ(b.queries.scalar_type(), at::kInt);
        at::Tensor y = at::zeros({3 * length, 2, 4}, at::kDouble);
        for (std::int64_t i = 0; i + 1 < b.queries.numel(); ++i) {
          const auto of = [&](const at::Tensor& t, const at::Tensor& cuts) {
            const auto from = cuts[i].item<std::int64_t>(), to = cuts[i + 1].item<std::int64_t>();
            return t.flatten(0, 1).narrow(0, from, to - from).unsqueeze(0);
          };
          const at::Tensor queries = of(q, b.queries), keys = of(k, b.keys);
          if (queries.size(1) == 0) continue;
          ASSERT_LE(queries.size(1), keys.size(1));
          of(y.unsqueeze(0), b.queries)
              .copy_(nn::composed_attention({.scale = 0.4, .start = keys.size(1) - queries.size(1)},
                                            {queries, keys, of(v, b.keys)}));
        }
        const at::Tensor expected = nn::composed_attention(c, {q, k, v, {}, at_keys});
        EXPECT_TRUE(at::allclose(y.reshape(expected.sizes()), expected, 1e-9, 1e-11))
            << first_key << ", " << first << ", " << end;
        EXPECT_EQ(b.queries[-1].item<std::int64_t>(), 3 * length);
        EXPECT_EQ(b.keys[-1].item<std::int64_t>(), 3 * num_keys);
      }
}

// What a library's kernel takes as it is: heads of one width, as many of keys as of queries.
TEST(ComposedAttention, IsTheFormulaWithHeadsOfOneWidth) {
  compare_composed(make_inputs(1, 7, 2, 2, 6));
}
// The softmax of one score is 1, whatever the score is.
TEST(ComposedAttention, OfOneNumberIsItsValue) {
  const auto one = [](double x) { return at::full({1, 1, 1, 1}, x, at::kDouble); };
  EXPECT_EQ(nn::composed_attention({.scale = 0.5}, {one(2), one(3), one(5)}).item<double>(), 5);
}

// The order of the tokens needs no mask of [L, S], nor does a window or a chunk that holds all of
// them: a long sequence would not fit. Counted on meta, as estimate counts, which has the shape of
// the result too.
TEST(ComposedAttention, HasAMaskOnlyWhereOneIsNeeded) {
  constexpr std::int64_t kLength = 512, kMask = kLength * kLength;
  const auto peak = [](const AttentionOptions& o) {
    const kernels::meta::DryRun memory(c10::DeviceType::CUDA);
    const at::Tensor x = at::empty({1, kLength, 2, 8}, at::TensorOptions(at::kMeta));
    const at::Tensor y =
        nn::composed_attention({.scale = 1, .window = o.window, .chunk = o.chunk}, {x, x, x});
    EXPECT_EQ(y.sizes(), x.sizes());
    return memory.peak();
  };
  for (const std::int64_t size : {std::int64_t{0}, kLength, kLength + 1}) {
    EXPECT_LT(peak({.window = size}), kMask) << size;
    EXPECT_LT(peak({.chunk = size}), kMask) << size;
  }
  EXPECT_GT(peak({.window = kLength - 1}), kMask);
}

// Between 8 and 16 the numbers of bfloat16 are 1/16 apart: rounded sinks would change the outputs
// by up to 3 %.
TEST(ComposedAttention, DoesNotRoundSinks) {
  auto in = make_inputs(2, 7, 4, 2);
  const AttentionOptions o{.scale = 0.4};
  const auto narrow = [](const at::Tensor& x) { return x.to(test_device(), at::kBFloat16); };
  const at::Tensor q = narrow(in.q), k = narrow(in.k), v = narrow(in.v);
  for (const double sink : {8.03, 9.031, 11.97, 14.1}) {
    in.sinks.fill_(sink);
    const at::Tensor sinks = in.sinks.to(test_device(), at::kFloat);
    const at::Tensor y =
        nn::composed_attention({.scale = o.scale}, {q, k, v, sinks}).cpu().to(at::kDouble);
    const auto wide = [](const at::Tensor& x) { return x.cpu().to(at::kDouble); };
    const at::Tensor expected = formula(wide(q), wide(k), wide(v), in.sinks, o);
    EXPECT_LT((y - expected).norm().item<double>(), 5e-3 * expected.norm().item<double>()) << sink;
  }
}

// Each query adds to d(sink) with its own rounding, and float32 keeps the sum: off by 7e-4 at most.
// As the feature of a key, in bfloat16, it was off by up to 6e-3.
TEST(ComposedAttention, SumsTheGradientOfSinksInFloat32) {
  at::manual_seed(5);
  constexpr std::int64_t kHeadsHere = 8;
  const auto narrow = [](const at::Tensor& x) {
    return x.to(at::kBFloat16).to(at::kDouble);  // the numbers that both begin with
  };
  const Inputs in{narrow(at::randn({2, 96, kHeadsHere, 16}, at::kDouble)),
                  narrow(at::randn({2, 96, 2, 16}, at::kDouble)),
                  narrow(at::rand({2, 96, 2, 16}, at::kDouble)),
                  at::randn({kHeadsHere}, at::kDouble)};
  const AttentionOptions o{.scale = 0.25, .window = 40};
  const auto gradient = [&](at::ScalarType dtype, at::ScalarType sink_dtype) {
    const at::Tensor sinks = in.sinks.to(test_device(), sink_dtype).detach().requires_grad_(true);
    const auto to = [&](const at::Tensor& x) { return x.to(test_device(), dtype); };
    nn::composed_attention({.scale = o.scale, .window = o.window},
                           {to(in.q), to(in.k), to(in.v), sinks})
        .sum()
        .backward();
    EXPECT_EQ(sinks.grad().scalar_type(), sink_dtype);
    return sinks.grad().cpu().to(at::kDouble);
  };
  const at::Tensor wide = gradient(at::kDouble, at::kDouble);  // IsTheFormula compares this
  const at::Tensor error = (gradient(at::kBFloat16, at::kFloat) - wide) / wide;
  EXPECT_LT(error.abs().max().item<double>(), 1.2e-3) << error;
}

// Chunks count from where a document begins, which may be any token: a query may see as many before
// it as a chunk has, and no more are sent.
TEST(Attention, OfDocumentsReachesAsFarAsAChunk) {
  comm::launch(4, [](comm::Group& world) {
    const Mesh mesh(world, {.cp = 4});
    const MeshScope scope(mesh);
    const Tokens tokens(mesh, 1, 16, true, SequenceCut::contiguous, {}, {starts_of({{5, 11}}), 16});
    const auto found = nn::seen_ranges(tokens, {.scale = 1, .window = 0, .chunk = 6});
    ASSERT_EQ(found.size(), 4U);
    for (std::int64_t r = 0; r < 4; ++r) {
      const PositionRanges expected{{std::max<std::int64_t>(0, 4 * r - 5), 4 * r + 4}};
      EXPECT_EQ(found[static_cast<std::size_t>(r)], expected);
    }
  });
}

// Scores depend only on distances, and would not show that all positions are off by one.
TEST(Attention, TheFirstTokenOfADocumentIsNotRotated) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const auto x = assume<Dense{T, T, R}>(at::empty({1, 8, 4}, at::kDouble));
  for (const bool has_documents : {false, true}) {
    nn::RopeTables tables;
    const Tokens tokens(mesh, 1, 8, true, SequenceCut::contiguous, {},
                        has_documents ? nn::Documents{starts_of({{3, 5}}), 8} : nn::Documents{});
    const auto table = nn::rope_of(tables, {.dim = 4}, tokens, x);
    const at::Tensor line =
        table.positions_BL.defined() ? table.positions_BL[0] : at::arange(8, at::kLong);
    const at::Tensor sin_L = table.sin.index_select(0, line).select(1, 0),
                     distance_L = has_documents ? at::tensor({0, 1, 2, 0, 1, 2, 3, 4}, at::kDouble)
                                                : at::arange(8, at::kDouble);
    EXPECT_TRUE(at::allclose(sin_L, distance_L.sin())) << has_documents;
  }
}

TEST(Attention, WithASinkFarBelowIsAttentionWithout) {
  auto in = make_inputs(1, 5, 2, 2);
  in.sinks.fill_(-100);
  const AttentionOptions o{.scale = 1};
  EXPECT_TRUE(at::allclose(on_mesh(in, o, true, {}).y, on_mesh(in, o, false, {}).y));
}

TEST(Attention, CountsWhatAQuerySees) {
  EXPECT_EQ(nn::mean_visible(4, {}), (1 + 2 + 3 + 4) / 4.0);
  EXPECT_EQ(nn::mean_visible(4, {.window = 2}), (1 + 2 + 2 + 2) / 4.0);
  EXPECT_EQ(nn::mean_visible(5, {.chunk = 2}), (1 + 2 + 1 + 2 + 1) / 5.0);
  EXPECT_EQ(nn::mean_visible(0, {}), 0);
  EXPECT_EQ(nn::mean_visible(4, {.window = 1}), 1);
  EXPECT_EQ(nn::mean_visible(4, {.chunk = 1}), 1);
  EXPECT_EQ(nn::num_visible({2, 4}, {}), 3 + 4);
  EXPECT_EQ(nn::num_visible({2, 7}, {.window = 2, .chunk = 3}), 2 + 1 + 2 + 2 + 1);
}

TEST(GroupedAttention, NamesHeadsThatTpDoesNotDivide) {
  const auto error = [](const nn::GroupedAttentionConfig& c) {
    return error_of(
        [&] {
          comm::launch(
              4,
              [&](comm::Group& world) {
                const Mesh mesh(world, {.tp = 4});
                const MeshScope scope(mesh);
                c.validate();
              },
              test_options());
        },
        ErrorKind::config);
  };
  expect_parts(error({.num_heads = 8, .num_kv_heads = 2}),
               {"num_kv_heads = 2", "tp = 4", "choose a tp"});
  expect_parts(error({.num_heads = 6, .num_kv_heads = 6}), {"num_heads = 6", "tp = 4"});
  expect_parts(error({.num_heads = 8, .num_kv_heads = 3}),
               {"num_heads = 8", "num_kv_heads = 3", "divisor"});
}

// A rank without queries: an empty result that still depends on its input.
TEST(ComposedAttention, HasItsShapeWithoutQueries) {
  const at::Tensor q = at::zeros({2, 0, 4, 8}, at::kDouble).requires_grad_(true);
  const at::Tensor y = nn::composed_attention(
      {.scale = 0.5},
      {q, at::ones({2, 5, 4, 8}, at::kDouble), at::ones({2, 5, 4, 6}, at::kDouble)});
  EXPECT_EQ(y.sizes(), (at::IntArrayRef{2, 0, 4, 6}));
  EXPECT_TRUE(y.requires_grad());
  const at::Tensor sinks = at::ones({4}, at::kDouble).requires_grad_(true);
  const at::Tensor with_sinks = nn::composed_attention(
      {.scale = 0.5},
      {q, at::ones({2, 5, 4, 8}, at::kDouble), at::ones({2, 5, 4, 6}, at::kDouble), sinks});
  EXPECT_EQ(with_sinks.sizes(), y.sizes());
  with_sinks.sum().backward();
  EXPECT_TRUE(at::equal(sinks.grad(), at::zeros({4}, at::kDouble)));
}

// Scores and values: 2 * 2 FLOPs for each visible key and feature of a head, three times with the
// backward.
TEST(GroupedAttention, CountsItsFlops) {
  const auto world = comm::solo_group();
  const Mesh mesh(*world, {});
  const MeshScope scope(mesh);
  const nn::GroupedAttention attention(
      {.dim = 10, .num_heads = 6, .num_kv_heads = 2, .head_dim = 4, .window = 2}, "a", {});
  EXPECT_EQ(attention.flops(4), 3 * 4 * 6 * 4 * ((1 + 2 + 2 + 2) / 4.0));
}

}  // namespace
}  // namespace moesh
