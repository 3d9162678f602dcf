#include "moesh/formats/pattern.h"

#include <re2/re2.h>

#include "moesh/base/error.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

re2::StringPiece piece(std::string_view text) { return {text.data(), text.size()}; }

// $1 as RE2 writes it: \1.
std::string rewrite(std::string_view replacement) {
  std::string result;
  for (std::size_t i = 0; i < replacement.size(); ++i) {
    const char c = replacement[i], next = i + 1 < replacement.size() ? replacement[i + 1] : '\0';
    if (c == '\\') {
      result += "\\\\";
    } else if (c == '$' && (next == '$' || next == '&' || (next >= '0' && next <= '9'))) {
      result += next == '$' ? "$" : next == '&' ? "\\0" : std::string("\\") + next;
      ++i;
    } else {
      result += c;
    }
  }
  return result;
}

}  // namespace

Pattern::Pattern(std::string_view text) {
  re2::RE2::Options options(re2::RE2::Latin1);
  options.set_log_errors(false);
  expression_ = std::make_shared<const re2::RE2>(piece(text), options);
  const std::string& where = expression_->error_arg();
  MOESH_CHECK(expression_->ok(), ErrorKind::config, shown(text),
              " is not a regular expression: ", expression_->error(),
              where.empty() ? "" : ", at " + shown(where));
}

bool Pattern::is_in(std::string_view text) const {
  return re2::RE2::PartialMatch(piece(text), *expression_);
}

std::string Pattern::replace(std::string_view text, std::string_view replacement) const {
  MOESH_CHECK(text.size() <= kMaxText, ErrorKind::config, "a name of ", text.size(),
              " letters is too long to search for ", shown(expression_->pattern()),
              ": it may have ", kMaxText);
  const std::string by = rewrite(replacement);
  std::string why;
  MOESH_CHECK(expression_->CheckRewriteString(piece(by), &why), ErrorKind::config,
              "the replacement ", shown(replacement), " of ", shown(expression_->pattern()),
              " names a group that is not there (", why, "); $1 is the first, $$ a dollar");
  std::string result(text);
  re2::RE2::GlobalReplace(&result, *expression_, piece(by));
  return result;
}

}  // namespace moesh::formats
