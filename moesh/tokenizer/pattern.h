#pragma once
// Split patterns: regular expressions as trees, and their matches in a text.

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/tokenizer/code_points.h"

namespace moesh::tokenizer {

// The parts of a regular expression, as a tree.

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

// Regular expressions of split patterns, matched as the package `tokenizers` does (it uses
// Oniguruma with Ruby's syntax): the leftmost match, alternatives in order, backtracking. A pattern
// is parsed once; what moesh does not know in it is an error that names it.

/// A range of bytes of a text; not empty.
struct Match {
  std::size_t begin, end;
};

class SplitPattern {
 public:
  /// `what` names the pattern in errors (data).
  SplitPattern(std::string_view regex, const std::string& what);

  // How a pattern is run: instruction by instruction, with a stack of the places where another way
  // can be tried.
  enum class Opcode : std::uint8_t {
    repeat,      // code points of a set, from min to max: first the most possible, then fewer
    possessive,  // the same, and never fewer
    split,       // go on at `to`; if that fails, at `other`
    jump,        // go on at `to`
    look,        // what follows matches up to `to` (an `accept`), or with `negative` does not
    line_start,
    line_end,
    accept,
  };
  struct Instruction {
    Opcode op;
    bool negative = false;
    std::uint32_t set = 0;  // a bit
    std::uint32_t min = 0, max = 0;
    std::uint32_t to = 0, other = 0;
  };

 private:
  friend class Matches;
  std::string what_, regex_;
  std::vector<Instruction> program_;
  CodePointMasks sets_;                // that instructions test
  std::vector<std::uint32_t> starts_;  // of the alternatives
  CodePointMasks firsts_;              // alternatives that can begin with a code point
};

/// The matches of a pattern in one text of valid UTF-8. Whether an instruction leads to a match
/// from a place does not depend on how it was reached: what has failed after a long repetition is
/// not tried again, so that a+b takes linear time on a text of a's. Where that does not help, as
/// for
/// (?:a|a)+b, Error (data) comes after a number of steps that is linear in the length of the text.
class Matches {
 public:
  Matches(const SplitPattern& pattern, std::string_view text);

  /// The first one at `from` or behind it; `from` does not go back.
  std::optional<Match> next(std::size_t from);

 private:
  using Instruction = SplitPattern::Instruction;
  // The code points of a repetition's set, as far as they go, and the first place among them from
  // which on what follows the repetition has failed.
  struct LongRun {
    const char *begin = nullptr, *end = nullptr, *failed = nullptr;
  };
  struct Untried {
    std::uint32_t pc;
    const char* at;
    const char* low;  // null, or: one code point less may be tried, down to here
  };
  const char* run(std::uint32_t pc, const char* at);
  const char* end_of_run(std::uint32_t pc, const char* at);

  const SplitPattern& pattern_;
  const char *const begin_, *const end_;
  std::int64_t steps_left_ = 0;
  std::int64_t unusual_ = 0;        // with fewer steps left, short runs are remembered, too
  std::vector<LongRun> long_runs_;  // of each instruction; empty: there was none
  std::vector<Untried> untried_;
};

}  // namespace moesh::tokenizer
