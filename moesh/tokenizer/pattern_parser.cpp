#include "moesh/tokenizer/pattern.h"

#include <algorithm>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/name.h"

namespace moesh::tokenizer {
namespace {

using Kind = PatternNode::Type;
using Greed = PatternNode::Greed;

bool is_digit(char32_t c) { return c >= '0' && c <= '9'; }
bool is_letter(char32_t c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// Pairs of letters which (?i:...) also finds as one: (?i:ss) matches a sharp s.
bool folds_into_one(char32_t a, char32_t b) {
  const auto lower = [](char32_t c) { return c | 0x20; };
  for (const auto& pair : {U"ss", U"ff", U"fi", U"fl", U"st"})
    if (lower(a) == pair[0] && lower(b) == pair[1]) return true;
  return false;
}

class Parser {
 public:
  Parser(std::string_view regex, const std::string& what)
      : text_(code_points(regex)), regex_(regex), what_(what) {}

  PatternNode parse() {
    PatternNode node = alternation();
    if (!at_end()) refuse("')' without '('");
    return node;
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw Error(ErrorKind::data,
                detail::concat(what_, ": the pattern ", formats::shown(regex_), " has ", reason,
                               " (at character ", at_, "), which moesh does not know"));
  }
  bool at_end() const { return at_ == text_.size(); }
  char32_t peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : U'\0';
  }
  bool take(char32_t c) {
    if (at_end() || peek() != c) return false;
    ++at_;
    return true;
  }
  char32_t next(const char* where) {
    if (at_end()) refuse(detail::concat("no end of ", where));
    return text_[at_++];
  }

  PatternNode alternation() {
    if (++depth_ > 50) refuse("groups nested deeper than 50");
    PatternNode node{.kind = Kind::alternation};
    do node.parts.push_back(sequence());
    while (take('|'));
    --depth_;
    return node.parts.size() == 1 ? std::move(node.parts[0]) : node;
  }

  PatternNode sequence() {
    PatternNode node{.kind = Kind::sequence};
    previous_ = 0;
    while (!at_end() && peek() != '|' && peek() != ')') node.parts.push_back(quantified());
    return node.parts.size() == 1 ? std::move(node.parts[0]) : node;
  }

  PatternNode quantified() {
    PatternNode node = atom();
    for (int num = 0;; ++num) {
      PatternNode repeat{.kind = Kind::repeat};
      bool is_interval = false;
      if (take('?'))
        repeat.max = 1;
      else if (take('*'))
        repeat.max = PatternNode::kNoLimit;
      else if (take('+'))
        repeat.min = 1, repeat.max = PatternNode::kNoLimit;
      else if (take('{'))
        interval(repeat), is_interval = true;
      else
        return node;
      // In Ruby's syntax a{1,3}+ is (?:a{1,3})+, not possessive as elsewhere: the loop takes the +.
      if (num > 1 || (num == 1 && is_interval)) refuse("a repetition of a repetition");
      if (num == 1 && !(repeat.min == 1 && repeat.max == PatternNode::kNoLimit && was_interval_))
        refuse("a repetition of a repetition");
      was_interval_ = is_interval;
      if (peek() == '?' && is_interval && repeat.min == repeat.max) refuse("'?' after '{n}'");
      if (take('?'))
        repeat.greed = Greed::lazy;
      else if (!is_interval && take('+'))
        repeat.greed = Greed::possessive;
      if (node.kind == Kind::look || node.kind == Kind::line_start || node.kind == Kind::line_end)
        refuse("a repetition of a place");
      if (node.kind != Kind::set && repeat.greed == Greed::possessive)
        refuse("a possessive repetition of a group");
      if (repeat.max > 1 && node.can_be_empty()) refuse("a repetition of what may be empty");
      repeat.parts.push_back(std::move(node));
      node = std::move(repeat);
    }
  }

  std::optional<std::uint32_t> number() {
    if (!is_digit(peek())) return std::nullopt;
    std::uint32_t n = 0;
    while (is_digit(peek())) {
      n = n * 10 + (next("a number") - '0');
      if (n > 1000) refuse("a repetition of more than 1000");
    }
    return n;
  }

  void interval(PatternNode& repeat) {
    const auto low = number();
    const bool comma = take(',');
    const auto high = comma ? number() : low;
    if ((!low && !high) || !take('}')) refuse("'{' without a number of repetitions");
    repeat.min = low.value_or(0);
    repeat.max = high.value_or(PatternNode::kNoLimit);
    if (repeat.min > repeat.max || repeat.max == 0) refuse("an interval that holds nothing");
  }

  PatternNode atom() {
    const char32_t c = next("the pattern");
    if (c != '\\' && !is_letter(c)) previous_ = 0;
    switch (c) {
      case '(': return group();
      case '[': return set_node(bracket());
      case '.': {
        CodePointSet newline;
        newline.add('\n', '\n');
        return set_node(newline.complement());
      }
      case '^': return {.kind = Kind::line_start};
      case '$': return {.kind = Kind::line_end};
      case '\\': {
        const auto [set, single] = escape();
        if (single) return literal(*single);
        previous_ = 0;
        return set_node(*set);
      }
      case '?':
      case '*':
      case '+':
      case '{': refuse("a repetition of nothing");
      default: return literal(c);
    }
  }

  static PatternNode set_node(CodePointSet set) {
    return {.kind = Kind::set, .set = std::move(set)};
  }

  PatternNode literal(char32_t c) {
    CodePointSet set;
    add_member(set, c, c);
    if (ignore_case_ && folds_into_one(previous_, c)) refuse("letters that fold into one in (?i:");
    previous_ = c;
    return set_node(set);
  }

  // A range, and under (?i: the other case of its letters.
  void add_member(CodePointSet& set, char32_t first, char32_t last) {
    set.add(first, last);
    if (!ignore_case_) return;
    if (last >= 0x80) refuse("a character that is not ASCII in (?i:");
    for (char32_t c = first; c <= last; ++c) {
      if (!is_letter(c)) continue;
      set.add(c ^ 0x20, c ^ 0x20);
      if ((c | 0x20) == 's') set.add(0x17F, 0x17F);    // long s
      if ((c | 0x20) == 'k') set.add(0x212A, 0x212A);  // the sign of kelvin
    }
  }

  PatternNode group() {
    const bool outer = ignore_case_;
    PatternNode node{.kind = Kind::look};
    bool is_look = false;
    if (take('?')) {
      const char32_t c = next("a group");
      if (c == '=' || c == '!') {
        is_look = true;
        node.negative = c == '!';
      } else if (c == 'i' && take(':')) {
        ignore_case_ = true;
      } else if (c != ':') {
        std::string text = "(?";
        append_utf8(text, c);
        refuse("'" + text + "'");
      }
    }
    PatternNode inner = alternation();
    if (!take(')')) refuse("no end of a group");
    ignore_case_ = outer;
    previous_ = 0;
    if (!is_look) return inner;
    node.parts.push_back(std::move(inner));
    return node;
  }

  struct Escape {
    std::optional<CodePointSet> set;
    std::optional<char32_t> single;
  };

  // Behind the backslash.
  Escape escape() {
    const char32_t c = next("an escape");
    const auto set_of = [&](CodePointSet set, bool negated) -> Escape {
      return {.set = negated ? set.complement() : std::move(set)};
    };
    switch (c) {
      case 's': return set_of(CodePointSet(tables::kPatternSpaces), false);
      case 'S': return set_of(CodePointSet(tables::kPatternSpaces), true);
      case 'w': return set_of(CodePointSet(tables::kPatternWords), false);
      case 'W': return set_of(CodePointSet(tables::kPatternWords), true);
      case 'd': return set_of(*category_set("Nd"), false);
      case 'D': return set_of(*category_set("Nd"), true);
      case 'p':
      case 'P': return set_of(property(), c == 'P');
      case 'r': return {.single = '\r'};
      case 'n': return {.single = '\n'};
      case 't': return {.single = '\t'};
      case 'f': return {.single = '\f'};
      case 'v': return {.single = '\v'};
      case 'x': return {.single = hexadecimal(take('{') ? 0 : 2)};
      case 'u': return {.single = hexadecimal(4)};
      default: break;
    }
    if (is_letter(c) || is_digit(c) || c >= 0x80) {
      std::string text = "'\\";
      append_utf8(text, c);
      refuse(text + "'");
    }
    return {.single = c};
  }

  // num_digits of them, or 0: up to a brace.
  char32_t hexadecimal(int num_digits) {
    char32_t value = 0;
    for (int i = 0; num_digits == 0 || i < num_digits; ++i) {
      const char32_t c = next("a number");
      if (num_digits == 0 && i > 0 && c == '}') break;
      const char32_t lower = c | 0x20;
      if (is_digit(c))
        value = value * 16 + (c - '0');
      else if (lower >= 'a' && lower <= 'f')
        value = value * 16 + (lower - 'a' + 10);
      else
        refuse("a number that is not hexadecimal");
      if (value > kLastCodePoint) refuse("a number beyond the last code point");
    }
    // The package takes \x80 for a byte.
    if (num_digits == 2 && value >= 0x80) refuse("'\\x' of a byte that is not ASCII");
    return value;
  }

  CodePointSet property() {
    if (!take('{')) refuse("'\\p' without '{'");
    const bool negated = take('^');
    std::string name;
    for (char32_t c; (c = next("a property")) != '}';) append_utf8(name, c);
    const auto set = category_set(name);
    if (!set) refuse("the property " + formats::shown(name));
    return negated ? set->complement() : *set;
  }

  // Behind the opening bracket.
  CodePointSet bracket() {
    const bool negated = take('^');
    CodePointSet set;
    if (peek() == ']') refuse("']' as the first of a set");
    while (!take(']')) {
      const auto first = member(set);
      if (!first) continue;
      if (peek() != '-' || peek(1) == ']') {
        add_member(set, *first, *first);
        continue;
      }
      ++at_;
      const auto last = member(set);
      if (!last || *last < *first) refuse("a range without order");
      add_member(set, *first, *last);
    }
    if (ignore_case_ && negated) refuse("'[^' in (?i:");
    return negated ? set.complement() : set;
  }

  // One of a set; what is a set itself is added to it.
  std::optional<char32_t> member(CodePointSet& set) {
    const char32_t c = next("a set");
    if (c == '[') refuse("'[' in a set without '\\'");
    if (c == '&' && peek() == '&') refuse("'&&' in a set");
    if (c != '\\') return c;
    const auto [others, single] = escape();
    if (single) return single;
    if (ignore_case_) refuse("a class of characters in (?i:");
    if (peek() == '-' && peek(1) != ']') refuse("'-' after a class of characters");
    set.add(*others);
    return std::nullopt;
  }

  std::u32string text_;
  std::string_view regex_;
  const std::string& what_;
  std::size_t at_ = 0;
  int depth_ = 0;
  bool ignore_case_ = false, was_interval_ = false;
  char32_t previous_ = 0;  // the literal before this one
};

}  // namespace

bool PatternNode::can_be_empty() const {
  switch (kind) {
    case Kind::set: return false;
    case Kind::sequence:
      return std::all_of(parts.begin(), parts.end(),
                         [](auto& part) { return part.can_be_empty(); });
    case Kind::alternation:
      return std::any_of(parts.begin(), parts.end(),
                         [](auto& part) { return part.can_be_empty(); });
    case Kind::repeat: return min == 0 || parts[0].can_be_empty();
    default: return true;
  }
}

CodePointSet PatternNode::first() const {
  if (can_be_empty()) return CodePointSet().complement();
  if (kind == Kind::set) return set;
  if (kind == Kind::repeat) return parts[0].first();
  CodePointSet all;
  for (const PatternNode& part : parts) {
    const bool is_sequence = kind == Kind::sequence;
    if (!is_sequence || !part.can_be_empty()) {
      all.add(part.first());
      if (is_sequence) break;
    } else if (part.kind == Kind::repeat && !part.parts[0].can_be_empty()) {
      all.add(part.parts[0].first());
    } else if (part.kind == Kind::repeat || part.kind == Kind::alternation ||
               part.kind == Kind::sequence) {
      return CodePointSet().complement();
    }
  }
  return all;
}

PatternNode parse_pattern(std::string_view regex, const std::string& what) {
  MOESH_CHECK(regex.size() <= 10'000, ErrorKind::data, what, ": the pattern has ", regex.size(),
              " bytes; a pattern may have 10,000");
  MOESH_CHECK(find_bad_utf8(regex) == std::string_view::npos, ErrorKind::data, what,
              ": the pattern is not UTF-8");
  return Parser(regex, what).parse();
}

}  // namespace moesh::tokenizer
