// Muon against its formula, written out for one rank, and on meshes against one rank: bit for bit,
// since the owner of a matrix has all of it.
#include "moesh/optim/muon.h"

#include <ATen/ops/linalg_matrix_norm.h>
#include <ATen/ops/matmul.h>
#include <gtest/gtest.h>

#include <cmath>

#include "moesh/optim/optimizer.h"
#include "moesh/optim/rule.h"
#include "tests/optim/support.h"
#include "tests/support.h"

namespace moesh::optim {
namespace {

constexpr MuonConfig kMuon{.momentum = 0.8, .weight_decay = 0.3};
constexpr double kRate = 0.1;

// A tall and a wide matrix, stacks of both, one whose four heads are matrices of their own, and one
// of which a rank has a single number.
struct Matrices {
  Param<Dense{I, I, I}> uncut{Model::spec("uncut", {9, 4}, {}), Model::init()};
  Param<Dense{I, I, F}> row{Model::spec("row", {7, 5}, {{tp, 1}}), Model::init()};
  Param<Dense{I, I, F}> heads{head_spec(), Model::init()};
  Param<Sparse{I, E, F}> up{Model::spec("up", {5, 7, 3}, {{ep, 0}, {etp, 1}}), Model::init()};
  Param<Sparse{I, E, F}> down{Model::spec("down", {5, 3, 7}, {{ep, 0}, {etp, 2}}, 1),
                              Model::init()};
  Param<Dense{I, I, I}> small{Model::spec("small", {2, 1}, {}), Model::init()};

  static ParamSpec head_spec() {
    ParamSpec spec = Model::spec("heads", {12, 5}, {{tp, 0}});
    spec.num_heads = 4;
    return spec;
  }
  template <class Fn>
  void each_param(Fn f) {
    f(uncut), f(row), f(heads), f(up), f(down), f(small);
  }
};

std::map<std::string, at::Tensor> train(const MuonConfig& config, int num_steps = 3) {
  Matrices all;
  ParamList list;
  all.each_param([&](auto& p) { list.add(p, p.name() == "up" ? Decay::off : Decay::on); });
  Optimizer optimizer(list, std::make_shared<Muon>(config));
  for (int step = 0; step < num_steps; ++step) {
    all.each_param([&](auto& p) {
      auto& s = p.stored();
      s.value.mutable_grad() = slice(whole_gradient(s.spec, step), s.shard).clone();
    });
    optimizer.step(kRate);
  }
  std::map<std::string, at::Tensor> values;
  all.each_param([&](auto& p) { values[p.name()] = local(value(p)).clone(); });
  return values;
}

std::map<std::string, at::Tensor> train_alone(const MuonConfig& config) {
  std::map<std::string, at::Tensor> values;
  on_mesh({}, [&](const Mesh&) { values = train(config); });
  return values;
}

// By singular values: each goes through p(s) = a s + b s^3 + c s^5 five times.
at::Tensor by_singular_values(const at::Tensor& g) {
  auto [u, s, vh] = at::linalg_svd(g / g.norm(), /*full_matrices=*/false);
  for (int i = 0; i < 5; ++i) s = 3.4445 * s - 4.7750 * s.pow(3) + 2.0315 * s.pow(5);
  return at::matmul(u * s, vh);
}

at::Tensor expected(const ParamSpec& spec, const MuonConfig& c, const at::Tensor& first) {
  const bool is_stack = spec.shape.size() == 3;
  const std::int64_t count = is_stack ? spec.shape[0] : c.by_head ? spec.num_heads : 1;
  const std::int64_t m = spec.shape.back(), n = first.numel() / count / m;
  at::Tensor w = first.reshape({count, n, m}).clone(), mean = at::zeros_like(w);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor g = whole_gradient(spec, step).reshape({count, n, m});
    mean = c.momentum * mean + (1 - c.momentum) * g;
    const at::Tensor u = c.nesterov ? (1 - c.momentum) * g + c.momentum * mean : mean;
    if (spec.name != "up") w = w - kRate * c.weight_decay * w;
    for (std::int64_t k = 0; k < count; ++k)
      w[k] -=
          kRate * 0.2 * std::sqrt(static_cast<double>(std::max(n, m))) * by_singular_values(u[k]);
  }
  return w.reshape(spec.shape);
}

TEST(Muon, IsItsFormula) {
  for (const MuonConfig& c :
       {kMuon, MuonConfig{.momentum = 0.6, .nesterov = false, .weight_decay = 0},
        MuonConfig{.momentum = 0, .by_head = true, .numbers_in_round = 50}}) {
    const auto values = train_alone(c);
    on_mesh({}, [&](const Mesh&) {
      Matrices().each_param([&](auto& p) {
        const at::Tensor first = p.stored().value.detach();
        EXPECT_TRUE(
            at::allclose(values.at(p.name()), expected(p.stored().spec, c, first), 1e-11, 1e-12))
            << p.name();
      });
    });
  }
}

TEST(Muon, GivesTheBitsOfOneRankOnMeshes) {
  for (const bool by_head : {false, true}) {
    MuonConfig config = kMuon;
    config.by_head = by_head;
    if (by_head) config.numbers_in_round = 10;
    const auto whole = train_alone(config);
    const auto all = meshes();
    for (std::size_t i = by_head ? 1 : 0; i < all.size(); i += 4)
      on_mesh(all[i], [&](const Mesh& mesh) {
        const auto values = train(config);
        Matrices().each_param([&](auto& p) {
          EXPECT_TRUE(at::equal(values.at(p.name()), slice(whole.at(p.name()), p.stored().compute)))
              << p.name() << " on " << mesh.shape().describe();
        });
      });
  }
}

// A run sets each flag by its own key, and not by its opposite.
TEST(Muon, IsMadeOfTheValuesOfARun) {
  const auto moved = [](const Optimizer::RulePtr& rule) {
    at::Tensor result;
    on_mesh({}, [&](const Mesh&) {
      ParamSpec spec = Matrices::head_spec();
      spec.dtype = at::kFloat;  // float64 is worked on in float64
      Param<Dense{I, I, F}> w(spec, Model::init());
      ParamList list;
      list.add(w);
      Optimizer optimizer(list, rule);
      for (int step = 0; step < 2; ++step) {
        w.stored().value.mutable_grad() = whole_gradient(spec, step);
        optimizer.step(kRate);
      }
      result = local(value(w)).clone();
    });
    return result;
  };
  std::vector<at::Tensor> all;
  for (const bool nesterov : {false, true})
    for (const bool float32 : {false, true})
      for (const bool by_head : {false, true}) {
        const at::Tensor made = moved(find_rule("muon").make({{"muon_momentum", 0.8},
                                                              {"nesterov", nesterov},
                                                              {"muon_float32", float32},
                                                              {"muon_by_head", by_head},
                                                              {"weight_decay", 0.3}}));
        EXPECT_TRUE(at::equal(made, moved(std::make_shared<Muon>(MuonConfig{
                                        .momentum = 0.8,
                                        .nesterov = nesterov,
                                        .weight_decay = 0.3,
                                        .newton_schulz = float32 ? at::kFloat : at::kBFloat16,
                                        .by_head = by_head}))));
        for (const at::Tensor& other : all) EXPECT_FALSE(at::equal(made, other));
        all.push_back(made);
      }
}

// The direction has no scale, so only what is kept tells that of the mean.
TEST(Muon, KeepsTheMeanOfTheGradients) {
  on_mesh({}, [](const Mesh&) {
    Param<Dense{I, I, I}> w(Model::spec("w", {3, 2}, {}), Model::init());
    ParamList list;
    list.add(w);
    Optimizer optimizer(list, std::make_shared<Muon>(kMuon));
    const at::Tensor g = whole_gradient(w.stored().spec, 0);
    w.stored().value.mutable_grad() = g.clone();
    optimizer.step(kRate);
    const at::Tensor kept = optimizer.state().at(0).value;
    EXPECT_TRUE(at::allclose(kept, (1 - kMuon.momentum) * g, 1e-14)) << kept;
  });
}

// Two messages for all parameters, and no rank has much more than its share of the matrices: the
// second message is what it sends home.
TEST(Muon, SendsEachMatrixToOneOfManyOwners) {
  std::vector<std::int64_t> bytes(4);
  on_mesh({.dp_replicate = 2, .dp_shard = 2}, [&](const Mesh& mesh) {
    const comm::Trace trace;
    train(kMuon, 1);
    std::vector<std::int64_t> messages;
    for (const auto& call : trace.entries())
      if (call.op == comm::Collective::all_to_all) messages.push_back(call.bytes);
    ASSERT_EQ(messages.size(), 2u);
    bytes[static_cast<std::size_t>(mesh.rank())] = messages[1];
  });
  const std::int64_t num = 9 * 4 + 7 * 5 + 12 * 5 + 2 * 5 * 21 + 2;  // to each of two replicas
  std::int64_t sum = 0;
  for (const std::int64_t b : bytes) sum += b;
  EXPECT_EQ(sum, 2 * num * static_cast<std::int64_t>(sizeof(double)));
  for (const std::int64_t b : bytes) EXPECT_LT(b, sum * 2 / 5);
}

// Matrices of 36 and 35 numbers fill a round of 4 x 10; those after them are larger, or the last.
TEST(Muon, TakesParametersInRounds) {
  on_mesh({.dp_shard = 4}, [&](const Mesh&) {
    MuonConfig config = kMuon;
    config.numbers_in_round = 10;
    const comm::Trace trace;
    train(config, 1);
    int num_messages = 0;
    for (const auto& call : trace.entries())
      num_messages += call.op == comm::Collective::all_to_all;
    EXPECT_EQ(num_messages, 2 * 5) << "uncut and row; heads; up; down; small";
  });
}

// Five steps, of three products each: x x' [n, n], its square, and that times x, n <= m.
TEST(Muon, CountsItsProducts) {
  const OneRankScope scope;
  const Matrices all;
  EXPECT_EQ(muon_flops(all.up.stored(), false), 5 * 5 * (2 * 3 * 3 * 7 + 2 * 27 + 2 * 3 * 3 * 7));
  EXPECT_EQ(muon_flops(all.heads.stored(), false), 5 * (2 * 25 * 12 + 2 * 125 + 2 * 25 * 12));
  EXPECT_EQ(muon_flops(all.heads.stored(), true), 4 * 5 * (2 * 9 * 5 + 2 * 27 + 2 * 9 * 5));
}

TEST(Muon, LeavesTablesAndVectorsToAdamW) {
  on_mesh({}, [](const Mesh&) {
    const auto is_for = find_rule("muon").is_for;
    ParamSpec table = Model::spec("embedding", {6, 4}, {});
    EXPECT_TRUE(is_for(Param<Dense{I, I, I}>(table).stored()));
    table.is_matrix = false;
    EXPECT_FALSE(is_for(Param<Dense{I, I, I}>(table).stored()));
    EXPECT_FALSE(is_for(Param<Dense{I, I, I}>(Model::spec("norm", {6}, {})).stored()));
    EXPECT_EQ(find_rule("muon").rule_of_others, "adamw");
  });
}

TEST(Muon, RefusesWhatItCannotDo) {
  EXPECT_EQ(error_of([] { Muon(MuonConfig{.momentum = 1}); }, ErrorKind::config),
            "Muon: momentum is 1; it takes 0 or more and less than 1, such as 0.95");
  EXPECT_EQ(error_of([] { Muon(MuonConfig{.weight_decay = -1}); }, ErrorKind::config),
            "Muon: weight_decay is -1; it takes 0 or more, such as 0.1");
}

}  // namespace
}  // namespace moesh::optim
