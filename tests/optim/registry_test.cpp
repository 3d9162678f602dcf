#include "moesh/optim/rules.h"

#include <gtest/gtest.h>

#include "moesh/optim/optimizer.h"
#include "tests/optim/support.h"
#include "tests/optim/take_step.h"
#include "tests/support.h"

namespace moesh::optim {
namespace {

// Values by a rule of the table are those by a rule that was made by hand, bit for bit: each key is
// read, and read as what it is.
void expect_same(const std::string& name, const RuleValues& values,
                 const std::shared_ptr<const Rule>& expected) {
  on_mesh({}, [&](const Mesh&) {
    Model a, b;
    Optimizer one(a.list(), find_rule(name).make(values)), other(b.list(), expected);
    for (int step = 0; step < 3; ++step) {
      a.set_gradients(step), b.set_gradients(step);
      take_step(one, 0.1), take_step(other, 0.1);
    }
    const auto values_b = b.values();
    for (const auto& [param, value] : a.values())
      EXPECT_TRUE(at::equal(value, values_b.at(param))) << name << ": " << param;
  });
}

TEST(RuleKinds, MakeWhatTheirValuesSay) {
  expect_same("adamw", {{"beta1", 0.7}, {"beta2", 0.8}, {"eps", 0.01}, {"weight_decay", 0.3}},
              std::make_shared<AdamW>(
                  AdamWConfig{.beta1 = 0.7, .beta2 = 0.8, .eps = 0.01, .weight_decay = 0.3}));
  expect_same("sgd", {{"momentum", 0.6}, {"weight_decay", 0.2}},
              std::make_shared<Sgd>(SgdConfig{.momentum = 0.6, .weight_decay = 0.2}));
}

TEST(RuleKinds, NeedTheirKeysAndNoOthers) {
  EXPECT_EQ(rule_names(), (std::vector<std::string>{"adamw", "sgd", "muon"}));
  for (const auto& kind : rule_kinds()) {
    RuleValues values;
    for (const auto& key : kind.keys) values[key] = 0.5;
    EXPECT_NE(kind.make(values), nullptr) << kind.name;
  }
}

TEST(RuleKinds, SayWhichThereAre) {
  EXPECT_EQ(error_of([] { find_rule("adam"); }, ErrorKind::config),
            "no update rule is called 'adam'; use adamw, sgd or muon");
}

}  // namespace
}  // namespace moesh::optim
