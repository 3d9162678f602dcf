// A rule that looks at whole matrices, of the kind of Muon: on every mesh it gives what one rank
// gives. It is here to prove the contract of rules.h.
#include "moesh/optim/rules.h"

#include <ATen/ops/matmul.h>
#include <gtest/gtest.h>

#include "moesh/fsdp/param.h"
#include "moesh/optim/optimizer.h"
#include "tests/fsdp/full_param.h"
#include "tests/optim/support.h"
#include "tests/optim/take_step.h"
#include "tests/support.h"

namespace moesh::optim {
namespace {

constexpr double kMomentum = 0.8;

// Newton-Schulz: the nearest matrix with orthonormal rows or columns.
at::Tensor orthogonalized(const at::Tensor& g) {
  at::Tensor x = g / g.norm();
  for (int i = 0; i < 5; ++i) {
    const at::Tensor a = at::matmul(x, x.t());
    x = 1.5 * x - 0.5 * at::matmul(a, x);
  }
  return x;
}

// One matrix, or one for each expert: the experts stay where they are, and only what cuts their
// matrices is joined. `update_norm`, the same on all ranks, is that of the last update.
class Orthogonal final : public Rule {
 public:
  RuleScope scope() const override { return RuleScope::parameter; }
  std::vector<StateSpec> state(const Stored& w) const override {
    std::vector<StateSpec> specs{{.name = "momentum"}};
    if (w.spec.shape.size() == 2)
      specs.push_back(
          {.name = "update_norm", .dtype = at::kFloat, .shape = std::vector<std::int64_t>{1}});
    return specs;
  }
  void update(const std::vector<ParamInStep>& params, const RuleStep& step) const override {
    for (const auto& p : params) {
      const Stored& w = *p.stored;
      const bool is_matrix = w.spec.shape.size() == 2;
      const Axes joined = is_matrix ? w.cutting : w.cutting & etp;
      step.write(p.state[0], p.state[0].mul(kMomentum).add_(step.clipped(p)));
      at::Tensor full = gather_full(w, p.state[0], joined).clone();
      if (is_matrix) {
        full = orthogonalized(full);
        step.write(p.state[1], full.norm().to(at::kFloat).expand({1}));
      } else {
        for (std::int64_t e = 0; e < full.size(0); ++e) full[e].copy_(orthogonalized(full[e]));
      }
      step.write(p.value, p.value.sub(shard_of(w, full, joined).mul(step.lr())));
    }
  }
};

Optimizer::ChooseRule matrices_apart() {
  const auto whole = std::make_shared<Orthogonal>();
  const auto elementwise = std::make_shared<Sgd>(SgdConfig{.momentum = 0.7});
  return [=](const ParamList::Entry& entry) -> Optimizer::RuleChoice {
    const auto& name = entry.stored->spec.name;
    if (name == "w" || name == "experts") return {whole};
    return {elementwise};
  };
}

struct Result {
  std::map<std::string, at::Tensor> values;
  double update_norm = 0;
};

Result train(Model& model) {
  Optimizer optimizer(model.list(), matrices_apart());
  for (int step = 0; step < 3; ++step) {
    model.set_gradients(step);
    take_step(optimizer, 0.1);
  }
  Result result{.values = model.values()};
  for (const auto& s : optimizer.state())
    if (s.name == "w.update_norm") result.update_norm = s.value.item<double>();
  return result;
}

Result train_alone() {
  Result result;
  on_mesh({}, [&](const Mesh&) {
    Model model;
    result = train(model);
  });
  return result;
}

TEST(WholeParameterRule, GivesWhatOneRankGivesOnEveryMesh) {
  const Result expected = train_alone();
  EXPECT_GT(expected.update_norm, 1);
  for (const auto& shape : meshes())
    on_mesh(shape, [&](const Mesh& mesh) {
      Model model;
      const Result mine = train(model);
      model.each_param([&](auto& p) {
        EXPECT_TRUE(at::allclose(mine.values.at(p.name()),
                                 slice(expected.values.at(p.name()), p.stored().compute), 1e-13,
                                 1e-14))
            << p.name() << " on " << mesh.shape().describe();
      });
      EXPECT_FLOAT_EQ(static_cast<float>(mine.update_norm),
                      static_cast<float>(expected.update_norm))
          << mesh.shape().describe();
    });
}

// Each parameter moves by its own rule: what the elementwise one moves has the bits of a run in
// which it moves everything, and the matrices have others.
TEST(Optimizer, MovesEachParameterByItsRule) {
  on_mesh({.dp_shard = 2, .tp = 2, .ep = 2}, [](const Mesh&) {
    Model a, b;
    Optimizer some(a.list(), matrices_apart());
    Optimizer all(b.list(), std::make_shared<Sgd>(SgdConfig{.momentum = 0.7}));
    for (int step = 0; step < 2; ++step) {
      a.set_gradients(step), b.set_gradients(step);
      take_step(some, 0.1), take_step(all, 0.1);
    }
    const auto one = a.values(), other = b.values();
    for (const char* name : {"norm", "bias", "sink"})
      EXPECT_TRUE(at::equal(one.at(name), other.at(name))) << name;
    for (const char* name : {"w", "experts"})
      EXPECT_FALSE(at::allclose(one.at(name), other.at(name))) << name;
  });
}

TEST(Optimizer, KeepsTheStateThatRulesDeclare) {
  on_mesh({.dp_shard = 2, .tp = 2, .ep = 2}, [](const Mesh&) {
    Model model;
    const Optimizer optimizer(model.list(), matrices_apart());
    std::vector<std::string> names;
    for (const auto& s : optimizer.state()) {
      names.push_back(s.name);
      const bool is_norm = s.name == "w.update_norm";
      EXPECT_EQ(s.is_sharded, !is_norm) << s.name;
      EXPECT_EQ(s.value.scalar_type(), is_norm ? at::kFloat : at::kDouble) << s.name;
      EXPECT_EQ(s.value.sizes().vec(),
                is_norm ? std::vector<std::int64_t>{1} : s.param->shard.length)
          << s.name;
      EXPECT_TRUE(s.value.eq(0).all().item<bool>()) << s.name;
    }
    EXPECT_EQ(names, (std::vector<std::string>{"norm.momentum_buffer", "w.momentum",
                                               "w.update_norm", "experts.momentum",
                                               "bias.momentum_buffer", "sink.momentum_buffer"}));
  });
}

// Ranks with an empty shard do not take part in an elementwise update.
TEST(OptimizerErrors, RefuseAnElementwiseRuleWithStateOfItsOwnShape) {
  class Wrong final : public Rule {
   public:
    RuleScope scope() const override { return RuleScope::element; }
    std::vector<StateSpec> state(const Stored&) const override {
      return {{.name = "count", .shape = std::vector<std::int64_t>{1}}};
    }
    void update(const std::vector<ParamInStep>&, const RuleStep&) const override {}
  };
  on_mesh({}, [](const Mesh&) {
    Model model;
    expect_parts(
        error_of([&] { Optimizer(model.list(), std::make_shared<Wrong>()); }, ErrorKind::internal),
        {"sees elements", "'count'", "'norm'"});
  });
}

TEST(OptimizerErrors, NameAParameterWithoutARule) {
  on_mesh({}, [](const Mesh&) {
    Model model;
    const auto only_w = [](const ParamList::Entry& entry) -> Optimizer::RuleChoice {
      return {entry.stored->spec.name == "w" ? std::make_shared<Sgd>() : nullptr};
    };
    EXPECT_EQ(error_of([&] { Optimizer(model.list(), only_w); }, ErrorKind::config),
              "parameter 'norm' has no update rule");
  });
}

}  // namespace
}  // namespace moesh::optim
