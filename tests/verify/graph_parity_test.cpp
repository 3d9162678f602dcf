#include "moesh/verify/verify_all.h"

#include <gtest/gtest.h>

#include "tests/train/device.h"
#include "tests/train/graphs_on_cpu.h"

namespace moesh::verify {
namespace {

VerifyCase case_of(const std::string& graph) {
  config::Settings settings = verify_defaults(2);
  for (const auto& s : test_settings()) settings.push_back(s);
  settings.push_back({"kernels.graph", graph, {"test"}});
  return {config::merged(settings)};
}

TEST(GraphParity, FindsAGraphThatDoesMoreThanTheStep) {
  GraphsOnCpu right, wrong;
  EXPECT_EQ(graph_mismatch(case_of("auto"), right.graphs()), "");
  EXPECT_EQ(right.num_replays, 2);
  wrong.does_it_twice = true;
  const std::string said = graph_mismatch(case_of("auto"), wrong.graphs());
  EXPECT_NE(said.find("gives other bits: step 3 loss is off by"), std::string::npos) << said;
}

TEST(GraphParity, AsksForNoneWhereNobodyWantsOneOrThereIsNone) {
  GraphsOnCpu unused;
  EXPECT_EQ(graph_mismatch(case_of("off"), unused.graphs()), "");
  EXPECT_TRUE(unused.beside_others.empty());
  EXPECT_EQ(graph_mismatch(case_of("auto")), "");
}

}  // namespace
}  // namespace moesh::verify
