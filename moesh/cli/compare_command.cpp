#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/cli/arguments.h"
#include "moesh/cli/commands.h"
#include "moesh/verify/compare.h"

namespace moesh::cli {

using namespace moesh::verify;

int run_compare(Args args) {
  CompareOptions options;
  if (const double tolerance = take_real(args, "--tolerance", -1); tolerance >= 0)
    options.tolerance = tolerance;
  while (const auto rename = take(args, "--rename")) {
    const auto at = rename->find('=');
    MOESH_CHECK(at != std::string::npos && at > 0, ErrorKind::config, "--rename is '", *rename,
                "'; it takes PATTERN=REPLACEMENT, as in --rename '^module\\.=model.'");
    options.renames.emplace_back(rename->substr(0, at), rename->substr(at + 1));
  }
  const bool all = take_flag(args, "--all");
  expect_words(args, 2, "moesh compare A B [--tolerance X] [--rename PATTERN=REPLACEMENT] [--all]");
  const Comparison c = compare(args[0], args[1], options);
  std::printf("%s\n", c.describe(all).c_str());
  return c.same() ? 0 : 1;
}

}  // namespace moesh::cli
