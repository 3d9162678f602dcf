#include <gtest/gtest.h>

#include "tests/train/reference_check.h"

namespace moesh::reference {
namespace {

class Reference : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, Reference, testing::ValuesIn(run_names()),
                         [](const auto& info) { return info.param; });

TEST_P(Reference, ARunIsWhatPyTorchComputes) { EXPECT_EQ(run_complaint(GetParam()), ""); }

}  // namespace
}  // namespace moesh::reference
