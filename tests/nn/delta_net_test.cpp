#include "moesh/nn/delta_net.h"

#include <gtest/gtest.h>

#include "moesh/fsdp/fsdp.h"
#include "tests/nn/delta_net_check.h"
#include "tests/spmd/device.h"
#include "tests/support.h"

namespace moesh {
namespace {

TEST(DeltaNet, IsTheFormulaWithItsGradients) {
  for (const bool has_documents : {false, true})
    EXPECT_EQ(delta_net_check::complaint({}, has_documents), "") << has_documents;
}

TEST(DeltaNet, IsTheSameUnderTp) {
  for (const bool has_documents : {false, true})
    EXPECT_EQ(delta_net_check::complaint({.tp = 2}, has_documents), "") << has_documents;
}

TEST(DeltaNet, RefusesCpAndHeadsThatTpDoesNotDivide) {
  const nn::DeltaNetConfig config{
      .dim = 4, .num_key_heads = 2, .num_value_heads = 4, .key_dim = 4, .value_dim = 4};
  const auto refused = [&](const MeshShape& shape) {
    std::string text;
    comm::launch(shape.num_ranks(), [&](comm::Group& world) {
      const Mesh mesh(world, shape);
      const MeshScope scope(mesh);
      const std::string found = error_of([&] { config.validate(); }, ErrorKind::config);
      if (world.rank() == 0) text = found;
    });
    return text;
  };
  expect_parts(refused({.cp = 2}), {"cp is 2", "parallelism.context_parallel_degree to 1"});
  expect_parts(refused({.tp = 3}), {"num_key_heads = 2", "tp = 3"});
}

}  // namespace
}  // namespace moesh
