#include "moesh/optim/groups.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moesh/optim/optimizer.h"
#include "moesh/optim/rules.h"
#include "tests/optim/support.h"
#include "tests/optim/take_step.h"
#include "tests/support.h"

namespace moesh::optim {
namespace {

TEST(Groups, TakeTheFirstPatternThatIsFoundInAName) {
  const Groups groups({{.match = "\\.gate\\."}, {.match = "layers\\.[01]\\."}, {.match = "^x$"}});
  EXPECT_EQ(groups.find("model.layers.0.mlp.gate.weight"), 0u);
  EXPECT_EQ(groups.find("model.layers.1.norm.weight"), 1u);
  EXPECT_EQ(groups.find("model.layers.10.norm.weight"), std::nullopt);
  EXPECT_EQ(groups.find("x"), 2u);
  EXPECT_EQ(groups.find("xx"), std::nullopt);
  EXPECT_EQ(Groups({}).find("x"), std::nullopt);
}

// Experts are one tensor here, and in files as many as there are: a pattern is for all of them.
TEST(Groups, FindParametersByTheirNamesInFiles) {
  const Groups groups({{.match = "gate_proj"}, {.match = "experts\\.1\\."}});
  const std::vector<std::string> gates{"l.0.experts.0.gate_proj.weight",
                                       "l.0.experts.1.gate_proj.weight"},
      ups{"l.0.experts.0.up_proj.weight", "l.0.experts.1.up_proj.weight"};
  EXPECT_EQ(groups.find("l.0.experts.w1", gates), 0u);
  EXPECT_EQ(groups.find("l.0.experts.w1"), std::nullopt);
  EXPECT_EQ(groups.find("l.0.router", {}), std::nullopt);
  expect_parts(error_of([&] { groups.find("l.0.experts.w3", ups); }, ErrorKind::config),
               {"optimizer.group.1.match is 'experts\\.1\\.'", "found in l.0.experts.1.up_proj",
                "not in l.0.experts.0.up_proj", "l.0.experts.w3", "match them all"});
}

TEST(Groups, RefuseWhatIsNoPattern) {
  expect_parts(error_of([] { Groups({{.match = "a"}, {.match = ""}}); }, ErrorKind::config),
               {"optimizer.group.1.match is empty"});
  expect_parts(error_of([] { Groups({{.match = "(a"}}); }, ErrorKind::config),
               {"optimizer.group.0.match", "(a"});
}

TEST(Groups, SayWhyOneHasFoundNothing) {
  const std::vector<std::string> names{"a.weight", "b.weight", "c.weight", "d.weight"};
  const Groups groups({{.match = "weight"}, {.match = "a"}, {.match = "router"}});
  const auto error = [&](std::vector<GroupMatch> matches) {
    return error_of([&] { check_matches(groups, matches, names); }, ErrorKind::config);
  };
  expect_parts(error({{4, 4}, {0, 0}, {1, 1}}),
               {"optimizer.group.1.match is 'a'", "in a group before it"});
  expect_parts(error({{4, 4}, {1, 1}, {0, 0}}),
               {"optimizer.group.2.match is 'router'", "no parameter has such a name", "a.weight"});
  expect_parts(error({{0, 0}, {1, 1}, {1, 1}}), {"optimizer.group.0.match is 'weight'"});
  std::vector<GroupMatch> all_found{{4, 4}, {1, 1}, {1, 1}, {0, 0}};
  all_found.pop_back();  // what is behind the end is not looked at
  check_matches(groups, all_found, names);
}

// Two groups in one optimizer move as two optimizers with a rate and a decay of their own.
template <class MakeRule>
void expect_ways_of_their_own(const MeshShape& shape, MakeRule make) {
  on_mesh(shape, [&](const Mesh&) {
    Model grouped, slow, fast;
    const auto decaying = make(0.3), plain = make(0.0);
    Optimizer both(grouped.list(), [&](const ParamList::Entry& e) {
      return e.stored->spec.name == "w" ? Optimizer::RuleChoice{decaying, 0.25}
                                        : Optimizer::RuleChoice{plain, 1};
    });
    Optimizer a(slow.list(), decaying), b(fast.list(), plain);
    for (int step = 0; step < 3; ++step) {
      for (Model* m : {&grouped, &slow, &fast}) m->set_gradients(step);
      take_step(both, 0.1), take_step(a, 0.025), take_step(b, 0.1);
    }
    const auto found = grouped.values(), of_w = slow.values(), of_others = fast.values();
    for (const auto& [name, value] : found) {
      EXPECT_TRUE(at::equal(value, name == "w" ? of_w.at(name) : of_others.at(name))) << name;
      EXPECT_FALSE(at::equal(value, name == "w" ? of_others.at(name) : of_w.at(name))) << name;
    }
  });
}

TEST(Groups, HaveARateAndADecayOfTheirOwn) {
  for (const MeshShape& shape : {MeshShape{}, MeshShape{.dp_shard = 2, .tp = 2, .ep = 2}}) {
    expect_ways_of_their_own(shape, [](double decay) -> Optimizer::RulePtr {
      return std::make_shared<AdamW>(AdamWConfig{.weight_decay = decay});
    });
    expect_ways_of_their_own(shape, [](double decay) -> Optimizer::RulePtr {
      return std::make_shared<Sgd>(SgdConfig{.weight_decay = decay});
    });
  }
}

TEST(Groups, StayWithoutARate) {
  on_mesh({}, [](const Mesh&) {
    Model model;
    const auto before = model.values();
    const auto rule = std::make_shared<AdamW>();
    Optimizer optimizer(model.list(), [&](const ParamList::Entry& e) {
      return Optimizer::RuleChoice{rule, e.stored->spec.name == "norm" ? 0.0 : 1.0};
    });
    model.set_gradients();
    take_step(optimizer, 0.1);
    for (const auto& [name, value] : model.values())
      EXPECT_EQ(at::equal(value, before.at(name)), name == "norm") << name;
  });
}

}  // namespace
}  // namespace moesh::optim
