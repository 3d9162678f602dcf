#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/cli/commands.h"
#include "moesh/formats/name.h"
#include "moesh/verify/compare.h"

namespace moesh::cli {

using namespace moesh::verify;
namespace {

std::string numbers(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (auto v : values) text += (text.size() > 1 ? ", " : "") + std::to_string(v);
  return text + "]";
}

void print(const ComparedTensor& t) {
  using State = ComparedTensor::State;
  const std::string name = formats::printable(t.name);
  switch (t.state) {
    case State::only_in_a:
      std::printf("only in A    %s%s\n", name.c_str(),
                  t.other_name == t.name
                      ? ""
                      : (" (looked for " + formats::printable(t.other_name) + " in B)").c_str());
      return;
    case State::only_in_b: std::printf("only in B    %s\n", name.c_str()); return;
    case State::shape_differs:
      std::printf("shape        %s: %s in A, %s in B\n", name.c_str(), numbers(t.shape).c_str(),
                  numbers(t.other_shape).c_str());
      return;
    case State::same:
    case State::differs: break;
  }
  std::printf("%s %s %s  error %.3g  factor %.6g",
              t.state == State::same ? "same        " : "differs     ", name.c_str(),
              numbers(t.shape).c_str(), t.relative(), t.factor);
  if (t.state == State::differs)
    std::printf("  worst at %s: %.6g, not %.6g", numbers(t.worst_index).c_str(), t.worst_a,
                t.worst_b);
  if (const auto text = t.diagnosis(); !text.empty())
    std::printf("\n             %s", text.c_str());
  std::printf("\n");
}

}  // namespace

int run_compare(const Given& given) {
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
  size_t num_same = 0;
  for (const auto& t : c.tensors) {
    const bool is_same = t.state == ComparedTensor::State::same;
    num_same += is_same;
    if (all || !is_same) print(t);
  }
  std::printf("%zu of %zu tensors are the same", num_same, c.tensors.size());
  if (const auto* first = c.first_difference())
    std::printf("; the first that differs: %s", formats::printable(first->name).c_str());
  std::printf("\n");
  return c.same() ? 0 : 1;
}

}  // namespace moesh::cli
