#include "moesh/kernels/experts.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "moesh/base/error.h"
#include "moesh/kernels/routing.h"
#include "moesh/kernels/table.h"
#include "tests/kernels/ref_moe.h"
#include "tests/kernels/support.h"

namespace moesh::kernels {
namespace {

// How tokens choose: at random, all the same experts, or only the even ones (the others stay
// without rows).
enum class Load { random, one, even };

struct Case {
  std::int64_t T, D, F, E, K;
  ExpertsConfig config;
  bool biases = false;
  bool indexed = true;  // rows are indices into tokens
  Load load = Load::random;

  std::string name() const {
    std::ostringstream os;
    os << "T" << T << " D" << D << " F" << F << " E" << E << " K" << K
       << (config.activation == Activation::swiglu ? "" : " clamped")
       << (config.scores == ScoreSide::none     ? " none"
           : config.scores == ScoreSide::before ? " before"
                                                : " after")
       << (biases ? " biases" : "") << (indexed ? " indexed" : " rows") << " load "
       << static_cast<int>(load);
    return os.str();
  }
};

const std::vector<std::string> kNames{"x", "scores", "w1", "w3", "w2", "b1", "b3", "b2"};

// Everything that can have a gradient, in the order of kNames; undefined where the case has none.
using Values = std::vector<at::Tensor>;

struct Problem {
  Case c;
  at::Tensor experts_TK;
  Values values;  // x_TD, scores_TK, weights
  at::Tensor dy_TD;

  explicit Problem(const Case& chosen, at::ScalarType dtype) : c(chosen) {
    const double weight =
        c.config.activation == Activation::swiglu ? 1 : 3;  // some beyond the clamps
    const auto bias = [&](at::IntArrayRef sizes, const char* name) {
      return c.biases ? normal(sizes, name, dtype, 0.5) : at::Tensor();
    };
    const double by_D = weight / std::sqrt(c.D),
                 by_F = 1 / std::sqrt(std::max<std::int64_t>(1, c.F));
    values = {normal({c.T, c.D}, "x", dtype),
              normal({c.T, c.K}, "scores", dtype == at::kDouble ? at::kDouble : at::kFloat),
              normal({c.E, c.F, c.D}, "w1", dtype, by_D),
              normal({c.E, c.F, c.D}, "w3", dtype, by_D),
              normal({c.E, c.D, c.F}, "w2", dtype, by_F),
              bias({c.E, c.F}, "b1"),
              bias({c.E, c.F}, "b3"),
              bias({c.E, c.D}, "b2")};
    if (c.config.scores == ScoreSide::none) values[1] = at::Tensor();
    dy_TD = normal({c.T, c.D}, "dy", dtype);
    at::Tensor wish = normal({c.T, c.E}, "wish");
    if (c.load == Load::one) wish = at::arange(c.E, wish.options()).expand({c.T, c.E});
    if (c.load == Load::even) wish = wish - 1e3 * at::remainder(at::arange(c.E, wish.options()), 2);
    experts_TK = std::get<1>(at::topk(wish, c.K, 1));
  }

  static ExpertsWeights weights(const Values& v) { return {v[2], v[3], v[4], v[5], v[6], v[7]}; }
};

struct Result {
  at::Tensor y;
  Values gradients;
};

using Forward = ExpertsOutput (*)(const ExpertsConfig&, const ExpertsWeights&, const ExpertsInput&);
using Backward = ExpertsGradients (*)(const ExpertsConfig&, const ExpertsWeights&, ExpertsSaved,
                                      const at::Tensor&);

Result run(const Problem& p, const Values& values, Forward forward = experts_forward,
           Backward backward = experts_backward) {
  const Case& c = p.c;
  const Sorted s = sort_by_expert(p.experts_TK, c.E);
  ExpertsInput in{.x = values[0], .ends_e = s.ends_e};
  if (values[1].defined()) in.scores_R = gather_rows(values[1].flatten(), s.order_R);
  if (c.indexed)
    in.token_R = s.token_R, in.inverse_TK = s.inverse_TK;
  else
    in.x = gather_rows(values[0], s.token_R);
  const auto weights = Problem::weights(values);
  const ExpertsOutput out = forward(c.config, weights, in);
  auto g =
      backward(c.config, weights, out.saved, c.indexed ? p.dy_TD : gather_rows(p.dy_TD, s.token_R));
  EXPECT_EQ(g.weights_later != nullptr, c.config.weights_later);
  if (g.weights_later) g.weights = g.weights_later();
  Result r;
  r.y = c.indexed ? out.y : combine_rows(out.y, s.inverse_TK);
  const at::Tensor dx = c.indexed ? g.x : combine_rows(g.x, s.inverse_TK);
  const at::Tensor d_scores =
      values[1].defined() ? gather_rows(g.scores_R, s.inverse_TK.flatten()).view_as(values[1])
                          : at::Tensor();
  r.gradients = {dx,
                 d_scores,
                 g.weights.w1_eFD,
                 g.weights.w3_eFD,
                 g.weights.w2_eDF,
                 g.weights.b1_eF,
                 g.weights.b3_eF,
                 g.weights.b2_eD};
  return r;
}

// The reference in float64 on the CPU, gradients by autograd.
Result reference(const Problem& p) {
  Values leaves, present;
  for (const auto& v : p.values) {
    leaves.push_back(v.defined() ? v.cpu().to(at::kDouble).clone().set_requires_grad(true) : v);
    if (v.defined()) present.push_back(leaves.back());
  }
  const at::Tensor weights_TK =
      leaves[1].defined() ? leaves[1] : at::ones({p.c.T, p.c.K}, at::kDouble);
  Result r;
  r.y = ref::experts(p.c.config, Problem::weights(leaves), leaves[0],
                     {p.experts_TK.cpu(), weights_TK});
  if (p.c.T == 0) {  // no op, so no graph: all gradients are zeros
    for (const auto& leaf : leaves)
      r.gradients.push_back(leaf.defined() ? at::zeros_like(leaf) : leaf);
    return r;
  }
  const auto found = torch::autograd::grad({r.y}, present, {p.dy_TD.cpu().to(at::kDouble)},
                                           std::nullopt, false, /*allow_unused=*/true);
  size_t next = 0;
  for (const auto& leaf : leaves) {
    if (!leaf.defined())
      r.gradients.emplace_back();
    else
      r.gradients.push_back(found[next].defined() ? found[next] : at::zeros_like(leaf)), ++next;
  }
  return r;
}

void expect_same(const Result& got, const Result& want, double tol, const std::string& what) {
  expect_close(got.y, want.y, tol, what + " y");
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (want.gradients[i].defined())
      expect_close(got.gradients[i], want.gradients[i], tol, what + " d(" + kNames[i] + ")");
    else
      EXPECT_FALSE(got.gradients[i].defined()) << what << " d(" << kNames[i] << ")";
  }
}

void check(const Case& c, at::ScalarType dtype) {
  SCOPED_TRACE(c.name() + " " + c10::toString(dtype));
  const Problem p(c, dtype);
  const Result want = reference(p);
  const Poison poison;
  expect_same(run(p, p.values), want, tolerance(dtype), "");
  expect_same(run(p, p.values, aten_kernels().experts_forward, aten_kernels().experts_backward),
              want, tolerance(dtype), "libtorch");
  // The gradients of the weights later: the same bits.
  Problem later = p;
  later.c.config.weights_later = true;
  expect_same(run(later, p.values), run(p, p.values), 0, "later");
  expect_same(run(later, p.values, aten_kernels().experts_forward, aten_kernels().experts_backward),
              run(p, p.values, aten_kernels().experts_forward, aten_kernels().experts_backward), 0,
              "libtorch, later");
}

const at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16};

ExpertsConfig with(ScoreSide side, Activation activation = Activation::swiglu) {
  return {activation, side};
}

TEST(Experts, EveryOptionAgreesWithTheReference) {
  for (auto dtype : kDtypes) {
    for (auto activation : {Activation::swiglu, Activation::clamped_swiglu}) {
      for (auto side : {ScoreSide::none, ScoreSide::before, ScoreSide::after}) {
        for (bool biases : {false, true}) {
          for (bool indexed : {false, true})
            check({11, 10, 6, 5, 2, {activation, side}, biases, indexed}, dtype);
        }
      }
    }
  }
}

TEST(Experts, EveryRemainder) {
  for (auto dtype : kDtypes) {
    for (std::int64_t n : {1, 2, 3, 7, 8, 9, 31, 33, 65}) {
      check({5, n, 4, 3, 2, with(ScoreSide::after), true}, dtype);
      check({5, 4, n, 3, 2, with(ScoreSide::before), true}, dtype);
      check({n, 4, 4, 3, 2, with(ScoreSide::after), true}, dtype);
      check({4, 4, 4, n, 1, with(ScoreSide::after)}, dtype);
      check({n, n, n, 2, 1, with(ScoreSide::after), false, false, Load::one}, dtype);
    }
  }
}

TEST(Experts, UnevenLoads) {
  for (auto dtype : kDtypes) {
    for (bool indexed : {false, true}) {
      for (auto load : {Load::one, Load::even}) {
        check({9, 6, 5, 8, 2, with(ScoreSide::after), true, indexed, load}, dtype);
        // Sizes that LibTorch's grouped GEMM takes.
        check({9, 8, 16, 8, 2, with(ScoreSide::before), true, indexed, load}, dtype);
      }
      check({0, 6, 5, 3, 2, with(ScoreSide::after), true, indexed}, dtype);
      check({1, 6, 5, 3, 1, with(ScoreSide::after), true, indexed}, dtype);
      check({6, 6, 5, 3, 3, with(ScoreSide::after), true, indexed}, dtype);  // K = E
      check({6, 8, 0, 3, 2, with(ScoreSide::after), true, indexed},
            dtype);  // more ranks than hidden units: this one has none
    }
  }
}

// The same layer with whole-tensor ops, for sizes at which the reference takes too long.
Result plain_ops(const Problem& p) {
  Values leaves, present;
  for (const auto& v : p.values) {
    leaves.push_back(v.defined() ? v.cpu().to(at::kDouble).clone().set_requires_grad(true) : v);
    if (v.defined()) present.push_back(leaves.back());
  }
  const bool before = p.c.config.scores == ScoreSide::before;
  at::Tensor y = at::zeros_like(leaves[0]);
  for (std::int64_t e = 0; e < p.c.E; ++e) {
    const at::Tensor hits = at::nonzero(p.experts_TK.cpu() == e), token = hits.select(1, 0);
    const at::Tensor score = leaves[1].index({token, hits.select(1, 1)}).unsqueeze(1);
    at::Tensor x = leaves[0].index({token});
    if (before) x = x * score;
    const auto bias = [&](int i) {
      return leaves[i].defined() ? leaves[i][e] : at::zeros({1}, at::kDouble);
    };
    const at::Tensor h =
        at::silu(x.mm(leaves[2][e].t()) + bias(5)) * (x.mm(leaves[3][e].t()) + bias(6));
    at::Tensor rows = h.mm(leaves[4][e].t()) + bias(7);
    if (!before) rows = rows * score;
    y = y.index_add(0, token, rows);
  }
  return {y, torch::autograd::grad({y}, present, {p.dy_TD.cpu().to(at::kDouble)})};
}

// Past every block size of the CPU version: rows of a block, depth of a panel, tokens of a chunk,
// rows of a tile.
TEST(Experts, SizesBeyondOneBlock) {
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const Case& c :
         std::vector<Case>{{600, 70, 66, 2, 1, with(ScoreSide::after), true, true, Load::one},
                           {600, 70, 66, 2, 2, with(ScoreSide::before), true, false},
                           {3, 2500, 3, 2, 1, with(ScoreSide::after), true},
                           {3, 3, 2500, 2, 1, with(ScoreSide::after), true},
                           {2300, 70, 6, 3, 2, with(ScoreSide::after), true},
                           {9000, 40, 20, 1, 1, with(ScoreSide::after), true},
                           {200, 300, 150, 2, 2, with(ScoreSide::after), true}}) {
      SCOPED_TRACE(c.name() + " " + c10::toString(dtype));
      const Problem p(c, dtype);
      const Result want = plain_ops(p);
      const Poison poison;
      expect_same(run(p, p.values), want, tolerance(dtype), "");
      expect_same(run(p, p.values, aten_kernels().experts_forward, aten_kernels().experts_backward),
                  want, tolerance(dtype), "libtorch");
    }
  }
}

// What processors without the library's microkernels run.
TEST(Experts, PlainGemmAgreesWithTheReference) {
  at::globalContext().setUserEnabledMkldnn(false);
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    check({11, 9, 7, 5, 2, with(ScoreSide::after), true}, dtype);
    check({90, 70, 66, 3, 2, with(ScoreSide::before), true, false}, dtype);
  }
  at::globalContext().setUserEnabledMkldnn(true);
}

// <d(value), v> against a difference quotient along v, in float64.
TEST(Experts, GradientsAreDerivatives) {
  for (auto activation : {Activation::swiglu, Activation::clamped_swiglu}) {
    for (auto side : {ScoreSide::before, ScoreSide::after}) {
      const Problem p({7, 5, 4, 3, 2, {activation, side}, true}, at::kDouble);
      const Result r = run(p, p.values);
      const auto loss = [&](const Values& values) {
        return (run(p, values).y * p.dy_TD).sum().item<double>();
      };
      for (size_t i = 0; i < kNames.size(); ++i) {
        const at::Tensor direction = normal(p.values[i].sizes(), "direction");
        constexpr double step = 1e-6;
        Values plus = p.values, minus = p.values;
        plus[i] = p.values[i] + step * direction;
        minus[i] = p.values[i] - step * direction;
        const double quotient = (loss(plus) - loss(minus)) / (2 * step),
                     slope = (r.gradients[i] * direction).sum().item<double>();
        EXPECT_NEAR(slope, quotient, 1e-6 * std::max(1.0, std::abs(quotient))) << kNames[i];
      }
    }
  }
}

TEST(Experts, LargeScoresAndInputsStayFinite) {
  for (auto activation : {Activation::swiglu, Activation::clamped_swiglu}) {
    Problem p({6, 4, 4, 2, 1, {activation, ScoreSide::after}}, at::kFloat);
    p.values[0] = p.values[0] * 1e3;
    const Result got = run(p, p.values), want = reference(p);
    expect_same(got, want, 1e-5, "large");
  }
}

TEST(Experts, ANanStaysWithItsToken) {
  for (auto dtype : kDtypes) {
    Problem p({6, 4, 4, 3, 1, with(ScoreSide::after)}, dtype);
    p.values[0][2][1] = std::numeric_limits<double>::quiet_NaN();
    const at::Tensor bad = at::isnan(run(p, p.values).y).all(1).cpu();
    expect_equal(bad.to(at::kLong), at::tensor({0, 0, 1, 0, 0, 0}, at::kLong),
                 c10::toString(dtype));
  }
}

// The ranks of an all_gather dispatcher each compute their own experts and sum the results.
TEST(Experts, RangesAddUpToTheWhole) {
  for (auto dtype : kDtypes) {
    const Problem p({13, 6, 5, 6, 3, with(ScoreSide::after), true}, dtype);
    const Result want = reference(p);
    at::Tensor y, dx, d_scores;
    for (const ExpertRange range :
         {ExpertRange{0, 2}, ExpertRange{2, 0}, ExpertRange{2, 3}, ExpertRange{5, 1}}) {
      const Poison poison;
      const Sorted s = sort_by_expert(p.experts_TK, p.c.E, range);
      ExpertsWeights w = Problem::weights(p.values);
      for (at::Tensor* t : {&w.w1_eFD, &w.w3_eFD, &w.w2_eDF, &w.b1_eF, &w.b3_eF, &w.b2_eD})
        *t = t->narrow(0, range.first, range.count);
      const auto out =
          experts_forward(p.c.config, w,
                          {p.values[0], s.ends_e, gather_rows(p.values[1].flatten(), s.order_R),
                           s.token_R, s.inverse_TK});
      const auto g = experts_backward(p.c.config, w, out.saved, p.dy_TD);
      const at::Tensor part = gather_rows(g.scores_R, s.inverse_TK.flatten()).view_as(p.values[1]);
      y = y.defined() ? y + out.y : out.y;
      dx = dx.defined() ? dx + g.x : g.x;
      d_scores = d_scores.defined() ? d_scores + part : part;
    }
    expect_close(y, want.y, tolerance(dtype), "y");
    expect_close(dx, want.gradients[0], tolerance(dtype), "d(x)");
    expect_close(d_scores, want.gradients[1], tolerance(dtype), "d(scores)");
  }
}

// After an exchange rows are rank-major: with K = 1 the experts undo that permutation themselves.
TEST(Experts, PermutedRowsComeBackInTheirPlace) {
  const Reordered order = rank_major_to_expert_major(
      at::tensor({2, 3, 1, 4, 0, 2}, at::kLong).view({3, 2}), test_device());
  const Problem p({12, 6, 5, 2, 1, with(ScoreSide::after)}, at::kFloat);
  const ExpertsWeights w = Problem::weights(p.values);
  const at::Tensor scores_R = normal({12}, "row scores", at::kFloat);
  const auto fused = experts_forward(
      p.c.config, w,
      {p.values[0], order.ends_e, scores_R, order.index_R, order.inverse_R.unsqueeze(1)});
  const auto plain = experts_forward(
      p.c.config, w, {gather_rows(p.values[0], order.index_R), order.ends_e, scores_R});
  expect_close(fused.y, gather_rows(plain.y, order.inverse_R), 1e-6, "y");
}

TEST(Experts, SavedStateIsTheInputAndThePreActivations) {
  const Problem p({8, 6, 4, 3, 2, with(ScoreSide::after), true}, at::kBFloat16);
  const Sorted s = sort_by_expert(p.experts_TK, 3);
  const ExpertsInput in{p.values[0], s.ends_e, gather_rows(p.values[1].flatten(), s.order_R),
                        s.token_R, s.inverse_TK};
  const auto saved = experts_forward(p.c.config, Problem::weights(p.values), in).saved;
  EXPECT_EQ(saved.input.x.data_ptr(), in.x.data_ptr());
  EXPECT_EQ(saved.input.scores_R.data_ptr(), in.scores_R.data_ptr());
  EXPECT_EQ(saved.input.token_R.data_ptr(), in.token_R.data_ptr());
  EXPECT_EQ(saved.input.inverse_TK.data_ptr(), in.inverse_TK.data_ptr());
  for (const at::Tensor& t : {saved.gate_RF, saved.up_RF}) {
    EXPECT_EQ(t.sizes(), at::IntArrayRef({16, 4}));
    EXPECT_EQ(t.storage().nbytes(), 16 * 4 * 2u);  // nothing larger hides behind a view
  }
}

TEST(Experts, BitsDoNotDependOnThreads) {
  const int before = at::get_num_threads();
  for (auto dtype : {at::kFloat, at::kBFloat16}) {
    const Problem p({700, 200, 70, 5, 2, with(ScoreSide::after), true}, dtype);
    at::set_num_threads(1);
    const Result one = run(p, p.values);
    for (int threads : {2, 5}) {
      at::set_num_threads(threads);
      const Result many = run(p, p.values);
      expect_equal(many.y, one.y, "y");
      for (size_t i = 0; i < kNames.size(); ++i)
        expect_equal(many.gradients[i], one.gradients[i], kNames[i]);
    }
  }
  at::set_num_threads(before);
}

TEST(Experts, RanksMayCallAtTheSameTime) {
  const Problem p({60, 20, 10, 4, 2, with(ScoreSide::after), true}, at::kFloat);
  const Result want = run(p, p.values);
  std::vector<Result> got(4);
  std::vector<std::thread> ranks;
  for (auto& result : got) {
    ranks.emplace_back([&] {
      for (int i = 0; i < 5; ++i) result = run(p, p.values);
    });
  }
  for (auto& rank : ranks) rank.join();
  for (const auto& result : got) {
    expect_equal(result.y, want.y, "y");
    for (size_t i = 0; i < kNames.size(); ++i)
      expect_equal(result.gradients[i], want.gradients[i], kNames[i]);
  }
}

TEST(Experts, PoisonIsOn) {
  const Poison poison;
  EXPECT_TRUE(at::isnan(at::empty({100}, test_device())).all().item<bool>());
}

TEST(Experts, WrongArgumentsAreNamed) {
  const Problem p({8, 6, 4, 3, 2, with(ScoreSide::after), true}, at::kFloat);
  const Sorted s = sort_by_expert(p.experts_TK, 3);
  const ExpertsInput good{p.values[0], s.ends_e, gather_rows(p.values[1].flatten(), s.order_R),
                          s.token_R, s.inverse_TK};
  const ExpertsWeights weights = Problem::weights(p.values);
  const auto message = [&](const ExpertsConfig& config, const ExpertsWeights& w,
                           const ExpertsInput& in) -> std::string {
    try {
      experts_forward(config, w, in);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::data);
      return e.what();
    }
    return "nothing was thrown";
  };
  const auto expect_named = [&](const std::string& text, const std::string& name) {
    EXPECT_EQ(text.substr(0, name.size()), name) << text;
  };
  EXPECT_EQ(message(p.c.config, weights, good), "nothing was thrown");
  ExpertsInput in = good;
  in.ends_e = good.ends_e.to(at::kLong);
  expect_named(message(p.c.config, weights, in), "ends_e is Long [3]");
  in.ends_e = good.ends_e.narrow(0, 0, 2);
  expect_named(message(p.c.config, weights, in), "ends_e is Int [2]");
  in = good, in.scores_R = at::Tensor();
  expect_named(message(p.c.config, weights, in), "scores_R is undefined");
  expect_named(message(with(ScoreSide::none), weights, good), "scores_R is Float [16]");
  in = good, in.inverse_TK = at::Tensor();
  expect_named(message(p.c.config, weights, in), "token_R is Int [16]");
  in = good, in.x = good.x.to(at::kDouble);
  expect_named(message(p.c.config, weights, in), "w1_eFD is Float [3, 4, 6]");
  in = good, in.x = good.x.to(at::kHalf);
  expect_named(message(p.c.config, weights, in), "x is Half");
  ExpertsWeights w = weights;
  w.w2_eDF = weights.w1_eFD;
  expect_named(message(p.c.config, w, good), "w2_eDF is Float [3, 4, 6]");
  w = weights, w.b2_eD = weights.b1_eF;
  expect_named(message(p.c.config, w, good), "b2_eD is Float [3, 4]");
  const auto saved = experts_forward(p.c.config, weights, good).saved;
  EXPECT_THROW(experts_backward(p.c.config, weights, saved, p.dy_TD.to(at::kDouble)), Error);
  EXPECT_THROW(experts_backward(p.c.config, weights, saved, p.dy_TD.narrow(0, 0, 3)), Error);
}

TEST(Experts, WrongEndsAreRefusedOnTheCpu) {  // a device is not asked: the host would wait
  const at::Tensor w = at::zeros({2, 2, 2});
  const auto message = [&](std::vector<std::int64_t> ends) -> std::string {
    try {
      experts_forward({.scores = ScoreSide::none}, {w, w, w},
                      {at::zeros({3, 2}), at::tensor(ends, at::kInt)});
    } catch (const Error& e) {
      return e.what();
    }
    return "nothing was thrown";
  };
  EXPECT_EQ(message({1, 3}), "nothing was thrown");
  EXPECT_EQ(message({1, 2}), "ends_e ends at 2, but there are 3 rows");
  EXPECT_EQ(message({4, 3}), "ends_e[1] is 3 after 4; the rows of experts follow one another");
  EXPECT_EQ(message({-1, 3}), "ends_e[0] is -1 after 0; the rows of experts follow one another");
}

// Kernels may write over what forward saved: the second backward must not read it.
TEST(Experts, ASecondBackwardIsRefused) {
  const Problem p({8, 6, 4, 3, 2, with(ScoreSide::after)}, at::kFloat);
  const Sorted s = sort_by_expert(p.experts_TK, 3);
  const ExpertsWeights weights = Problem::weights(p.values);
  const auto saved =
      experts_forward(p.c.config, weights,
                      {p.values[0], s.ends_e, gather_rows(p.values[1].flatten(), s.order_R),
                       s.token_R, s.inverse_TK})
          .saved;
  const std::int64_t gate = saved.gate_RF._version(), up = saved.up_RF._version();
  experts_backward(p.c.config, weights, saved, p.dy_TD);
  EXPECT_GT(saved.gate_RF._version(), gate);  // which is what autograd looks at
  EXPECT_GT(saved.up_RF._version(), up);
  try {
    experts_backward(p.c.config, weights, saved, p.dy_TD);
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find("a second backward of the experts"), 0u) << e.what();
  }
}

TEST(Experts, RowsOutOfOrderAreRefusedOnTheCpu) {
  const at::Tensor w = at::zeros({1, 2, 2});
  const auto rows = [&](std::vector<std::int64_t> tokens) {
    const at::Tensor token_R = at::tensor(tokens, at::kInt);
    experts_forward({.scores = ScoreSide::none}, {w, w, w},
                    {at::zeros({2, 2}),
                     at::tensor({token_R.numel()}, at::kInt),
                     {},
                     token_R,
                     at::tensor({0, 1}, at::kInt).view({2, 1})});
  };
  EXPECT_NO_THROW(rows({0, 1}));
  EXPECT_THROW(rows({1, 0}), Error);
  EXPECT_THROW(rows({0, 2}), Error);
  EXPECT_THROW(rows({-1, 0}), Error);
}

// With LoRA: what the weights w + scale b a give, and of a and b the gradients that follow from
// theirs.
void check_lora(const Case& c, bool on_gate_up, bool on_down, std::int64_t r) {
  SCOPED_TRACE(c.name() + (on_gate_up ? " gate_up" : "") + (on_down ? " down" : ""));
  const Problem p(c, at::kDouble);
  const Sorted s = sort_by_expert(p.experts_TK, c.E);
  ExpertsInput in{.x = c.indexed ? p.values[0] : gather_rows(p.values[0], s.token_R),
                  .ends_e = s.ends_e};
  if (p.values[1].defined()) in.scores_R = gather_rows(p.values[1].flatten(), s.order_R);
  if (c.indexed) in.token_R = s.token_R, in.inverse_TK = s.inverse_TK;
  const at::Tensor dy = c.indexed ? p.dy_TD : gather_rows(p.dy_TD, s.token_R);

  ExpertsWeights with = Problem::weights(p.values), merged = with;
  ExpertsLora& l = with.lora;
  l.scale13 = 0.7, l.scale2 = 1.3;
  if (on_gate_up) {
    l.a13_erD = normal({c.E, r, c.D}, "a13"), l.b13_e2Fr = normal({c.E, 2, c.F, r}, "b13");
    merged.w1_eFD = merged.w1_eFD + l.scale13 * l.b13_e2Fr.select(1, 0).bmm(l.a13_erD);
    merged.w3_eFD = merged.w3_eFD + l.scale13 * l.b13_e2Fr.select(1, 1).bmm(l.a13_erD);
  }
  if (on_down) {
    l.a2_erF = normal({c.E, r, c.F}, "a2"), l.b2_eDr = normal({c.E, c.D, r}, "b2");
    merged.w2_eDF = merged.w2_eDF + l.scale2 * l.b2_eDr.bmm(l.a2_erF);
  }
  const Poison poison;
  const auto want = experts_forward(c.config, merged, in),
             got = experts_forward(c.config, with, in);
  expect_close(got.y, want.y, 1e-10, "y");
  const auto d = experts_backward(c.config, merged, want.saved, dy);
  auto g = experts_backward(c.config, with, got.saved, dy);
  EXPECT_EQ(g.weights_later != nullptr, c.config.weights_later);
  const ExpertsWeights w = d.weights_later ? d.weights_later() : d.weights;
  if (g.weights_later) g.weights = g.weights_later();
  expect_close(g.x, d.x, 1e-10, "d(x)");
  if (in.scores_R.defined()) expect_close(g.scores_R, d.scores_R, 1e-10, "d(scores)");
  EXPECT_FALSE(g.weights.w1_eFD.defined() || g.weights.w2_eDF.defined());  // they are frozen
  const ExpertsLora& found = g.weights.lora;
  EXPECT_EQ(found.a13_erD.defined(), on_gate_up);
  EXPECT_EQ(found.a2_erF.defined(), on_down);
  if (on_gate_up) {
    const at::Tensor dw = at::stack({w.w1_eFD, w.w3_eFD}, 1).flatten(1, 2) * l.scale13;
    expect_close(found.b13_e2Fr.flatten(1, 2), dw.bmm(l.a13_erD.transpose(1, 2)), 1e-10, "d(b13)");
    expect_close(found.a13_erD, l.b13_e2Fr.flatten(1, 2).transpose(1, 2).bmm(dw), 1e-10, "d(a13)");
  }
  if (on_down) {
    const at::Tensor dw = w.w2_eDF * l.scale2;
    expect_close(found.b2_eDr, dw.bmm(l.a2_erF.transpose(1, 2)), 1e-10, "d(b2)");
    expect_close(found.a2_erF, l.b2_eDr.transpose(1, 2).bmm(dw), 1e-10, "d(a2)");
  }
}

TEST(ExpertsWithLora, GiveWhatMergedWeightsGive) {
  for (auto activation : {Activation::swiglu, Activation::clamped_swiglu})
    for (auto side : {ScoreSide::none, ScoreSide::before, ScoreSide::after})
      for (bool indexed : {false, true})
        for (bool later : {false, true})
          check_lora({11, 10, 6, 5, 2, {activation, side, later}, side != ScoreSide::none, indexed},
                     true, true, 3);
  for (bool on_down : {false, true})
    check_lora({9, 6, 5, 8, 2, with(ScoreSide::after), false, true, Load::even}, !on_down, on_down,
               1);
  check_lora({0, 4, 4, 3, 2, with(ScoreSide::after)}, true, true, 2);
}

// In bfloat16 by grouped GEMMs where the ranks allow them, and one by one where they do not.
TEST(ExpertsWithLora, HoldInBfloat16) {
  for (const std::int64_t r : {3, 8}) {
    const Case c{40, 16, 8, 4, 2, with(ScoreSide::after)};
    const Problem p(c, at::kBFloat16);
    const Sorted s = sort_by_expert(p.experts_TK, c.E);
    const ExpertsInput in{p.values[0], s.ends_e, gather_rows(p.values[1].flatten(), s.order_R),
                          s.token_R, s.inverse_TK};
    ExpertsWeights narrow = Problem::weights(p.values);
    narrow.lora = {normal({4, r, 16}, "a13", at::kBFloat16, 0.2),
                   normal({4, 2, 8, r}, "b13", at::kBFloat16, 0.2),
                   normal({4, r, 8}, "a2", at::kBFloat16, 0.2),
                   normal({4, 16, r}, "b2", at::kBFloat16, 0.2),
                   0.5,
                   0.5};
    const auto wide = [](const at::Tensor& t) { return t.defined() ? t.to(at::kFloat) : t; };
    const ExpertsLora& l = narrow.lora;
    const ExpertsWeights in_float{
        wide(narrow.w1_eFD),
        wide(narrow.w3_eFD),
        wide(narrow.w2_eDF),
        {},
        {},
        {},
        {wide(l.a13_erD), wide(l.b13_e2Fr), wide(l.a2_erF), wide(l.b2_eDr), 0.5, 0.5}};
    ExpertsInput input = in;
    input.x = wide(in.x);
    const auto got = experts_forward(c.config, narrow, in),
               want = experts_forward(c.config, in_float, input);
    expect_close(got.y.to(at::kFloat), want.y, 2e-2, "y");
    const auto g = experts_backward(c.config, narrow, got.saved, p.dy_TD),
               d = experts_backward(c.config, in_float, want.saved, wide(p.dy_TD));
    expect_close(wide(g.weights.lora.b13_e2Fr), d.weights.lora.b13_e2Fr, 3e-2, "d(b13)");
    expect_close(wide(g.weights.lora.a2_erF), d.weights.lora.a2_erF, 3e-2, "d(a2)");
  }
}

}  // namespace
}  // namespace moesh::kernels
