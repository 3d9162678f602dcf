#include "moesh/cli/usage.h"

#include <gtest/gtest.h>

namespace moesh::cli {
namespace {

const char* const kAll =
    "usage: all of it\n"
    "\n"
    "  train          trains\n"
    "  trainer        another\n"
    "                   --steps N   of it\n"
    "  help           this\n"
    "\n"
    "  moesh train is an example\n";

TEST(Usage, IsThePartOfOneCommand) {
  EXPECT_EQ(usage_of(kAll, "train"), "  train          trains\n");
  EXPECT_EQ(usage_of(kAll, "trainer"),
            "  trainer        another\n                   --steps N   of it\n");
  EXPECT_EQ(usage_of(kAll, "help"), "  help           this\n");
  EXPECT_EQ(usage_of(kAll, "steps"), "");
  EXPECT_EQ(usage_of(kAll, "tr"), "");
}

}  // namespace
}  // namespace moesh::cli
