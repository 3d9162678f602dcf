#pragma once
// Regular expressions of split patterns, matched as the package `tokenizers` does (it uses
// Oniguruma with Ruby's syntax): the leftmost match, alternatives in order, backtracking. A pattern
// is parsed once; what moesh does not know in it is an error that names it.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/tokenizer/code_points.h"

namespace moesh::tokenizer {

/// Of bytes of a text; not empty.
struct Match {
  std::size_t begin, end;
};

class Pattern {
 public:
  /// `what` names the pattern in errors (data).
  Pattern(std::string_view regex, const std::string& what);

  /// The first match at `from` or behind it, in a text of valid UTF-8.
  std::optional<Match> find(std::string_view text, std::size_t from) const;

  // How a pattern is run: instruction by instruction, with a stack of the places where another way
  // can be tried.
  enum class Op : std::uint8_t {
    repeat,      // code points of a set, from min to max: as many as there are, then fewer
    possessive,  // the same, and never fewer
    split,       // go on at `to`; if that fails, at `other`
    jump,        // go on at `to`
    look,        // what follows matches up to `to` (an `accept`), or with `negative` does not
    line_start,
    line_end,
    accept,
  };
  struct Instruction {
    Op op;
    bool negative = false;
    std::uint32_t set = 0;  // a bit
    std::uint32_t min = 0, max = 0;
    std::uint32_t to = 0, other = 0;
  };

 private:
  const char* run(std::uint32_t pc, const char* at, std::string_view text) const;

  std::string what_;
  std::vector<Instruction> program_;
  CodePointMasks sets_;                // that instructions test
  std::vector<std::uint32_t> starts_;  // of the alternatives
  CodePointMasks firsts_;              // alternatives that can begin with a code point
};

}  // namespace moesh::tokenizer
