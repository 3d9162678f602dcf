#include "moesh/base/error.h"

#include <gtest/gtest.h>

#include <thread>

#include "moesh/base/log.h"

namespace moesh {
namespace {

TEST(Error, CarriesKindAndValues) {
  const std::vector<int> sizes{2, 3};
  try {
    MOESH_CHECK(sizes.size() == 3, ErrorKind::config, "sizes ", sizes, " are ", sizes.size(),
                "; use 3");
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::config);
    EXPECT_STREQ(e.what(), "sizes [2, 3] are 2; use 3");
  }
}

TEST(Error, InternalOnesNameTheCondition) {
  try {
    MOESH_CHECK(1 + 1 == 3, "sum is ", 2);
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::internal);
    const std::string text = e.what();
    EXPECT_NE(text.find("sum is 2"), std::string::npos) << text;
    EXPECT_NE(text.find("1 + 1 == 3"), std::string::npos) << text;
    EXPECT_NE(text.find("error_test.cpp"), std::string::npos) << text;
  }
}

TEST(Error, TextIsBuiltOnlyOnFailure) {
  int evaluated = 0;
  MOESH_CHECK(true, ErrorKind::data, ++evaluated);
  EXPECT_EQ(evaluated, 0);
}

std::string last_line;

TEST(Log, CarriesTheRankOfItsThread) {
  set_log_sink([](LogLevel, const std::string& line) { last_line = line; });
  std::thread([] {
    set_log_rank(3);
    log_warn("loss is ", 1.5);
  }).join();
  EXPECT_EQ(last_line, "[warn rank 3] loss is 1.5");
  log_info("started");
  EXPECT_EQ(last_line, "[info] started");
  set_log_level(LogLevel::error);
  log_warn("dropped");
  EXPECT_EQ(last_line, "[info] started");
  set_log_level(LogLevel::info);
  set_log_sink(nullptr);
}

}  // namespace
}  // namespace moesh
