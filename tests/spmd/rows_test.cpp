#include "moesh/spmd/rows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/spmd/spmd.h"
#include "tests/comm/trace.h"
#include "tests/spmd/device.h"
#include "tests/spmd/on_mesh.h"

namespace moesh {
namespace {

using enum Place;

at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape, at::kDouble).to(test_device(), dtype);
}

// Every bit of every part, also of NaN and -0, at row sizes that do and do not fill a word.
TEST(Together, PartsKeepTheirBits) {
  for (std::int64_t n : {0, 1, 5})
    for (std::int64_t d : {1, 2, 3, 4, 8})
      for (auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
        at::Tensor scores = random({n, 2}, at::kFloat);
        if (n > 0) scores[0][0] = NAN, scores[0][1] = -0.0;
        const std::vector<at::Tensor> parts{
            random({n, d}, dtype), scores.select(1, 1), scores,
            at::arange(n * 3).reshape({n, 3}).to(test_device(), at::kInt),
            random({n + 1, 1, d}, dtype).narrow(0, n > 0 ? 1 : 0, n)};
        const at::Tensor packed = raw::pack_rows(parts);
        EXPECT_EQ(packed.size(0), n);
        const auto back = raw::unpack_rows(packed, parts);
        for (size_t i = 0; i < parts.size(); ++i) {
          EXPECT_EQ(back[i].sizes(), parts[i].sizes());
          EXPECT_EQ(back[i].scalar_type(), parts[i].scalar_type());
          EXPECT_TRUE(at::equal(back[i].clone(at::MemoryFormat::Contiguous).view(at::kByte),
                                parts[i].clone(at::MemoryFormat::Contiguous).view(at::kByte)))
              << n << " rows of " << d << ", part " << i;
        }
      }
}

// Copies move the widest words that fit every part, wherever in memory a part begins.
TEST(Together, WordsAreAsWideAsTheyCanBe) {
  const auto word = [](std::int64_t d, at::ScalarType dtype) {
    return raw::pack_rows({random({3, d}, dtype), random({3, 2}, at::kDouble)}).scalar_type();
  };
  EXPECT_EQ(word(2, at::kFloat), at::kLong);
  EXPECT_EQ(word(3, at::kFloat), at::kInt);
  EXPECT_EQ(word(3, at::kBFloat16), at::kBFloat16);
  const at::Tensor all = random({9}, at::kFloat), other = random({4, 1}, at::kDouble);
  const at::Tensor off = all.narrow(0, 1, 8).view({4, 2});  // begins within a word
  const auto back = raw::unpack_rows(raw::pack_rows({off, other}), {off, other});
  EXPECT_TRUE(at::equal(back[0], off) && at::equal(back[1], other));
}

// <f(x), y> == <x, f'(y)> over all ranks, for two tensors of different dtypes in one message.
TEST(Together, AGatherAndItsAdjoint) {
  for (int ranks : {1, 2, 3, 4})
    on_mesh({.tp = ranks}, [&](comm::Group& world) {
      std::vector<std::int64_t> rows;
      for (int r = 0; r < ranks; ++r) rows.push_back((r * 3 + 1) % 4);
      const auto mine = rows[static_cast<size_t>(world.rank())];
      at::manual_seed(world.rank());
      const auto x = as_leaf(assume<Dense{T, T, T}>(random({mine, 3}, at::kDouble))),
                 s = as_leaf(assume<Dense{T, T, T}>(random({mine}, at::kFloat)));
      const auto number = assume<Dense{T, T, T}>(
          at::full({mine, 1}, world.rank(), at::TensorOptions(at::kInt).device(test_device())));
      const comm::Trace forward;
      const auto [all_x, all_s, all_n] = all_gather_together<tp>(rows, x, s, number);
      EXPECT_EQ(forward.entries().size(), ranks == 1 ? 0u : 1u);
      static_assert(std::remove_cvref_t<decltype(all_x)>::layout == Dense{T, T, R});
      EXPECT_TRUE(
          at::equal(local(all_x), local(all_gather<tp>(detach(x), {.dim = 0, .sizes = rows}))));
      EXPECT_TRUE(
          at::equal(local(all_s), local(all_gather<tp>(detach(s), {.dim = 0, .sizes = rows}))));
      std::vector<int> owners;
      for (int r = 0; r < ranks; ++r) owners.insert(owners.end(), rows[static_cast<size_t>(r)], r);
      EXPECT_TRUE(at::equal(local(all_n).flatten().cpu(), at::tensor(owners, at::kInt)));

      at::manual_seed(100 + world.rank());  // R in the gradient's adjoint is P:
                                            // other terms on each
      const at::Tensor yx = random(local(all_x).sizes(), at::kDouble),
                       ys = random(local(all_s).sizes(), at::kFloat);
      const comm::Trace backward_trace;
      ((local(all_x) * yx).sum() + (local(all_s) * ys).sum().to(at::kDouble)).backward();
      EXPECT_EQ(backward_trace.entries().size(), ranks == 1 ? 0u : 1u);
      const auto total = [&](const at::Tensor& t) { return world.all_reduce(t.to(at::kDouble)); };
      const double left =
          total((local(all_x).detach() * yx).sum() + (local(all_s).detach() * ys).sum())
              .item<double>();
      const double right = total((local(x).detach() * local(x).grad()).sum() +
                                 (local(s).detach() * local(s).grad()).sum())
                               .item<double>();
      EXPECT_NEAR(left, right, 1e-5 * std::max(1.0, std::abs(left)));
      // What the host's reduction gives, to the bit.
      EXPECT_TRUE(at::equal(local(x).grad(), world.reduce_scatter(yx, rows)));
      EXPECT_TRUE(at::equal(local(s).grad(), world.reduce_scatter(ys, rows)));
    });
}

// bfloat16 terms are added in float32 and rounded once.
TEST(Together, TermsAreRoundedOnce) {
  on_mesh({.tp = 4}, [](comm::Group& world) {
    const auto x = as_leaf(assume<Dense{T, T, T}>(random({2, 2}, at::kBFloat16))),
               s = as_leaf(assume<Dense{T, T, T}>(random({2}, at::kFloat)));
    const auto [all_x, all_s] = all_gather_together<tp>({2, 2, 2, 2}, x, s);
    // 1 and three terms that vanish beside it one by one, and not together.
    const double term = world.rank() == 0 ? 1.0 : 0.0026;
    (local(all_x) * term).sum().backward();
    EXPECT_TRUE(at::equal(local(x).grad(), at::full_like(local(x).grad(), 1.0078125)));
    EXPECT_TRUE(at::equal(local(s).grad(), at::zeros_like(local(s).grad())));
  });
}

TEST(Together, RowsGoToExpertsAndTheirGradientsComeBack) {
  on_mesh({.tp = 2, .ep = 2}, [](comm::Group& world) {
    const std::vector<std::int64_t> send = world.rank() == 0 ? std::vector<std::int64_t>{1, 2}
                                                             : std::vector<std::int64_t>{0, 3},
                                    recv = world.rank() == 0 ? std::vector<std::int64_t>{1, 0}
                                                             : std::vector<std::int64_t>{2, 3};
    const auto x = as_leaf(assume<Sparse{T, T, T}>(random({3, 4}, at::kBFloat16))),
               s = as_leaf(assume<Sparse{T, T, T}>(random({3}, at::kFloat)));
    const comm::Trace forward;
    const auto [rows, scores] = start_to_experts<ep>(send, recv, x, s).wait();
    EXPECT_EQ(forward.entries().size(), 1u);
    static_assert(std::remove_cvref_t<decltype(scores)>::layout == Sparse{T, E, T});
    EXPECT_TRUE(at::equal(local(rows), world.all_to_all(local(x).detach(), send, recv)));
    EXPECT_TRUE(at::equal(local(scores), world.all_to_all(local(s).detach(), send, recv)));
    const at::Tensor yr = random(local(rows).sizes(), at::kBFloat16),
                     ys = random(local(scores).sizes(), at::kFloat);
    const comm::Trace backward_trace;
    ((local(rows) * yr).sum().to(at::kFloat) + (local(scores) * ys).sum()).backward();
    EXPECT_EQ(backward_trace.entries().size(), 1u);
    EXPECT_TRUE(at::equal(local(x).grad(), world.all_to_all(yr, recv, send)));
    EXPECT_TRUE(at::equal(local(s).grad(), world.all_to_all(ys, recv, send)));
  });
}

// Halves of float32 as words: what a code loses shows, and so does a code that is one too many.
class Halves final : public RowCodec {
 public:
  at::Tensor encode(const at::Tensor& rows_RD) const override {
    return rows_RD.div(2).to(at::kInt);
  }
  at::Tensor decode(const at::Tensor& words, const at::Tensor& like) const override {
    EXPECT_EQ(words.size(1), like.size(1));
    return words.to(like.scalar_type()).mul(2);
  }
};
at::Tensor halved(const at::Tensor& t) { return t.div(2).to(at::kInt).to(t.scalar_type()).mul(2); }

// Rows go to their experts in codes, over one hop or two and over etp, and gradients come back as
// they are; and the other way round for what comes home.
TEST(Coded, RowsGoInCodesAndComeBackWithout) {
  const Codec codec = std::make_shared<Halves>();
  const auto numbers = [](std::int64_t rows, std::int64_t width) {
    return at::randn({rows, width}, at::kDouble).mul(50).to(test_device());
  };
  on_mesh({.dp_shard = 2, .tp = 2, .ep = 2, .etp = 2}, [&](comm::Group& world, const Mesh& mesh) {
    at::manual_seed(world.rank());
    const auto group = mesh.group(ep);
    const int me = group->rank();
    const std::vector<std::int64_t> send{1, 2}, recv{1 + me, 1 + me};
    const std::int64_t came = 2 + 2 * me;
    const std::vector<std::int64_t> gathered{came, came};
    const auto x = as_leaf(assume<Sparse{T, T, T}>(numbers(3, 4)));
    const auto s = as_leaf(assume<Sparse{T, T, T}>(numbers(3, 1)));
    const auto reversed =
        map_linear([](const at::Tensor& t) { return t.flip(0); },
                   [](const at::Tensor& g) { return g.flip(0); }, coded(x, codec));
    const comm::Trace trace;
    const auto [there, scores] = start_to_experts<ep>(send, recv, reversed, s).wait();
    const auto [all, all_s] = all_gather_together<etp>(gathered, there, scores);
    // Rank me sends 3 rows of 4 words of 4 bytes, and 3 scores of 8.
    EXPECT_EQ(trace.entries().at(0).bytes, 3 * (4 * 4 + 8));
    EXPECT_EQ(trace.entries().at(1).bytes, came * (4 * 4 + 8));
    const auto rows = decoded(all);
    static_assert(std::remove_cvref_t<decltype(rows)>::layout == Sparse{T, E, R});
    const at::Tensor want = mesh.group(etp)->all_gather(
        group->all_to_all(halved(local(x).detach().flip(0)), send, recv), gathered);
    EXPECT_TRUE(at::equal(local(rows), want));
    const at::Tensor y = numbers(2 * came, 4);
    (local(rows) * y).sum().backward();
    const at::Tensor sum = mesh.group(etp)->reduce_scatter(y, gathered);
    EXPECT_TRUE(at::equal(local(x).grad(), group->all_to_all(sum, recv, send).flip(0)));
    EXPECT_EQ(local(s).grad().abs().sum().item<double>(), 0);

    const auto at_experts = as_leaf(assume<Sparse{T, E, P}>(numbers(2 * came, 4)));
    const auto home =
        start_to_owners<ep>(reduce_scatter<etp>(at_experts, {.dim = 0, .sizes = gathered}, codec),
                            recv, send, codec)
            .wait();
    EXPECT_TRUE(at::equal(local(home), group->all_to_all(mesh.group(etp)->reduce_scatter(
                                                             local(at_experts).detach(), gathered),
                                                         recv, send)));
    const at::Tensor dy = numbers(3, 4);
    local(home).backward(dy);
    EXPECT_TRUE(at::equal(
        local(at_experts).grad(),
        mesh.group(etp)->all_gather(group->all_to_all(halved(dy), send, recv), gathered)));
  });
}

TEST(Coded, OneRankHasTheSameNumbers) {
  on_mesh({}, [](comm::Group&) {
    const Codec codec = std::make_shared<Halves>();
    const auto x = as_leaf(assume<Sparse{T, T, T}>(at::arange(12, at::kDouble).view({3, 4})));
    const auto there = start_to_experts<ep>({3}, {3}, coded(x, codec)).wait();
    EXPECT_TRUE(at::equal(local(decoded(there)), halved(local(x).detach())));
    EXPECT_TRUE(at::equal(local(decoded(coded(x, nullptr))), local(x)));
    const auto y = with_coded_gradient(decoded(there), codec);
    EXPECT_TRUE(at::equal(local(y), halved(local(x).detach())));
    const at::Tensor dy = at::arange(12, at::kDouble).view({3, 4}).mul(3);
    local(y).backward(dy);
    EXPECT_TRUE(at::equal(local(x).grad(), halved(dy)));
  });
}

// One rank has all experts: its rows are where they belong, each tensor as it was.
// Rows of a KiB and more are not copied into a message with others; they arrive all the same.
TEST(Together, WideRowsAreAMessageOfTheirOwn) {
  on_mesh({.dp_shard = 2, .ep = 2}, [](comm::Group& world) {
    const std::vector<std::int64_t> send{1, 2}, recv{1 + world.rank(), 1 + world.rank()};
    const auto leaf = [&](std::int64_t width, at::ScalarType dtype) {
      return as_leaf(assume<Sparse{T, T, T}>(random({3, width}, dtype)));
    };
    const auto wide = leaf(128, at::kDouble), narrow = leaf(127, at::kDouble),
               score = leaf(1, at::kFloat), also_wide = leaf(256, at::kFloat);
    const comm::Trace trace;
    const auto there = start_to_experts<ep>(send, recv, wide, narrow, score, also_wide).wait();
    EXPECT_EQ(trace.entries().size(), 3U);
    const auto expect_of = [&](const auto& x, const auto& came) {
      EXPECT_TRUE(at::equal(local(came).detach(), world.all_to_all(local(x).detach(), send, recv)));
    };
    expect_of(wide, std::get<0>(there)), expect_of(narrow, std::get<1>(there));
    expect_of(score, std::get<2>(there)), expect_of(also_wide, std::get<3>(there));
    const at::Tensor v = random(local(std::get<0>(there)).sizes(), at::kDouble),
                     w = random(local(std::get<3>(there)).sizes(), at::kFloat);
    ((local(std::get<0>(there)) * v).sum() + (local(std::get<3>(there)) * w).sum()).backward();
    EXPECT_TRUE(at::equal(local(wide).grad(), world.all_to_all(v, recv, send)));
    EXPECT_TRUE(at::equal(local(also_wide).grad(), world.all_to_all(w, recv, send)));
    EXPECT_EQ(local(score).grad().abs().sum().item<double>(), 0);
  });
}

TEST(Together, RowsOfOneRankStay) {
  on_mesh({}, [](comm::Group&) {
    const auto x = as_leaf(assume<Sparse{T, T, T}>(random({3, 4}, at::kBFloat16))),
               s = as_leaf(assume<Sparse{T, T, T}>(random({3}, at::kFloat)));
    const auto [rows, scores] = start_to_experts<ep>({3}, {3}, x, s).wait();
    EXPECT_TRUE(at::equal(local(rows), local(x)));
    EXPECT_TRUE(at::equal(local(scores), local(s)));
    ((local(rows) * 2).sum().to(at::kFloat) + (local(scores) * 3).sum()).backward();
    EXPECT_TRUE(at::equal(local(x).grad(), at::full_like(local(x), 2)));
    EXPECT_TRUE(at::equal(local(s).grad(), at::full_like(local(s), 3)));
  });
}

}  // namespace
}  // namespace moesh
