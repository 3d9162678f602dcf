#pragma once
// The parts of a regular expression, as a tree.

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/tokenizer/code_points.h"

namespace moesh::tokenizer {

struct PatternNode {
  enum class Type { set, sequence, alternation, repeat, look, line_start, line_end };
  enum class Greed { greedy, lazy, possessive };
  static constexpr std::uint32_t kNoLimit = std::numeric_limits<std::uint32_t>::max();

  Type kind = Type::sequence;
  CodePointSet set = {};
  std::vector<PatternNode> parts = {};  // of a repeat and of a look: one
  std::uint32_t min = 0, max = 0;
  Greed greed = Greed::greedy;
  bool negative = false;

  bool can_be_empty() const;
  /// The code points that it can begin with; all where it can be empty.
  CodePointSet first() const;
};

/// `what` names the pattern in errors (data).
PatternNode parse_pattern(std::string_view regex, const std::string& what);

}  // namespace moesh::tokenizer
