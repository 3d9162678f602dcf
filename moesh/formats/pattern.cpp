#include "moesh/formats/pattern.h"

#include <re2/re2.h>

#include "moesh/base/error.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

re2::StringPiece piece(std::string_view text) { return {text.data(), text.size()}; }

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// $1 and ${1} as RE2 writes them: \1.
std::string rewrite(std::string_view replacement) {
  std::string result;
  const auto at = [&](std::size_t i) { return i < replacement.size() ? replacement[i] : '\0'; };
  for (std::size_t i = 0; i < replacement.size(); ++i) {
    const char c = replacement[i], next = at(i + 1);
    if (c == '\\') {
      result += "\\\\";
    } else if (c == '$' && next == '{' && is_digit(at(i + 2)) && at(i + 3) == '}') {
      result += std::string("\\") + at(i + 2);
      i += 3;
    } else if (c == '$' && (next == '$' || next == '&' || is_digit(next))) {
      MOESH_CHECK(!is_digit(next) || !is_digit(at(i + 2)), ErrorKind::config, "the replacement ",
                  shown(replacement), " has $", next, at(i + 2),
                  ", and groups have one digit; for group ", next, " and a ", at(i + 2),
                  " write ${", next, "}", at(i + 2));
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
