// What a report says of errors: which are verdicts on the mesh, and that they are safe to print.

#include <gtest/gtest.h>

#include <new>

#include "moesh/config/merge.h"
#include "moesh/verify/verify.h"
#include "tests/support.h"

namespace moesh::verify {
namespace {

VerifyReport after(const std::function<void()>& f) {
  VerifyReport report;
  launch_for(report, config::load_config({"--mesh=tp=2"}), [&](comm::Group&) { f(); });
  EXPECT_FALSE(report.holds());
  return report;
}

TEST(Reports, AreOfTheMesh) {
  const auto of = [](ErrorKind kind) { return after([kind] { throw Error(kind, "x"); }); };
  for (const auto kind : {ErrorKind::comm, ErrorKind::internal, ErrorKind::diverged})
    EXPECT_EQ(of(kind).error, "x");
  for (const auto kind : {ErrorKind::config, ErrorKind::data, ErrorKind::storage})
    EXPECT_EQ(error_of([&] { of(kind); }, kind), "x");
  EXPECT_THROW(after([] { throw std::bad_alloc(); }), std::bad_alloc);
}

TEST(Reports, AreSafeToPrint) {
  const auto text = after([] {
                      throw Error(ErrorKind::comm, "x\u009b2J\u202e\nmoesh: done\x1b[31m");
                    }).describe({.tp = 2});
  expect_parts(text, {"threw: x\\u009b2J\\u202e\\x0amoesh: done\\x1b[31m"});
}

}  // namespace
}  // namespace moesh::verify
