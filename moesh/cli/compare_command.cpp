#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/cli/commands.h"
#include "moesh/verify/compare.h"

namespace moesh::cli {

using namespace moesh::verify;

int run_compare(const Arguments& given) {
  CompareOptions options;
  if (const double tolerance = given.real("--tolerance", -1); tolerance >= 0)
    options.tolerance = tolerance;
  for (const std::string& rename : given.texts("--rename")) {
    const auto at = rename.find('=');
    MOESH_CHECK(at != std::string::npos && at > 0, ErrorKind::config, "--rename is '", rename,
                "'; it takes PATTERN=REPLACEMENT, as in --rename '^module\\.=model.'");
    options.renames.emplace_back(rename.substr(0, at), rename.substr(at + 1));
  }
  const bool all = given.has("--all");
  given.expect_words(2);
  const Comparison c = compare(given.rest()[0], given.rest()[1], options);
  std::printf("%s\n", c.describe(all).c_str());
  return c.same() ? 0 : 1;
}

}  // namespace moesh::cli
