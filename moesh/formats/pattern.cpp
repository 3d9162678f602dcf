#include "moesh/formats/pattern.h"

#include <algorithm>
#include <cctype>
#include <memory>

#include "moesh/base/error.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

constexpr std::size_t kMaxDepth = 50;     // of groups in groups
constexpr std::size_t kMaxRepeats = 200;  // in {m,n}
constexpr std::size_t kNone = static_cast<std::size_t>(-1);

using Letters = std::bitset<256>;

template <class F>
Letters letters_where(const F& f) {
  Letters set;
  for (std::size_t c = 0; c < 256; ++c) set[c] = f(static_cast<unsigned char>(c));
  return set;
}
bool is_word(unsigned char c) { return c < 128 && (std::isalnum(c) || c == '_'); }
bool is_space(unsigned char c) { return c < 128 && std::isspace(c); }
bool is_digit(unsigned char c) { return c >= '0' && c <= '9'; }

}  // namespace

/// A grammar by recursive descent; a repetition is written out, so the tree stands between.
class PatternCompiler {
 public:
  PatternCompiler(std::string_view text, Pattern& to) : text_(text), to_(to) {}

  void run() {
    const auto whole = alternatives(0);
    if (at_ < text_.size()) fail("there is a ) without its (");
    push({Op::save, 0});
    emit(*whole);
    push({Op::save, 1});
    push({Op::match});
    to_.num_groups_ = num_groups_;
  }

 private:
  using Op = Pattern::Op;
  struct Node {
    enum class Kind { set, assertion, sequence, choice, group, repeat } kind;
    std::size_t number = 0;  // of the set, of the group
    Op assertion = Op::begin;
    std::vector<std::unique_ptr<Node>> parts = {};
    std::size_t least = 0, most = 0;  // of a repeat
    bool is_lazy = false;
  };
  using Tree = std::unique_ptr<Node>;
  using Kind = Node::Kind;

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(ErrorKind::config, detail::concat(shown(text_), " is not a regular expression: ",
                                                  why, " (at character ", at_ + 1, ")"));
  }
  bool is_over() const { return at_ >= text_.size(); }
  bool takes(std::string_view what) {
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  char next() {
    if (is_over()) fail("it ends too early");
    return text_[at_++];
  }

  Tree set_of(const Letters& letters) {
    auto& sets = to_.sets_;
    auto found = std::find(sets.begin(), sets.end(), letters);
    if (found == sets.end()) found = sets.insert(sets.end(), letters);
    return std::make_unique<Node>(
        Node{.kind = Kind::set, .number = static_cast<std::size_t>(found - sets.begin())});
  }
  static Letters one(char c) {
    Letters set;
    set.set(static_cast<unsigned char>(c));
    return set;
  }

  Tree alternatives(std::size_t depth) {
    if (depth > kMaxDepth) fail(detail::concat("more than ", kMaxDepth, " groups in groups"));
    Node choice{.kind = Kind::choice};
    do choice.parts.push_back(sequence(depth));
    while (takes("|"));
    if (choice.parts.size() == 1) return std::move(choice.parts[0]);
    return std::make_unique<Node>(std::move(choice));
  }

  Tree sequence(std::size_t depth) {
    Node all{.kind = Kind::sequence};
    while (!is_over() && text_[at_] != '|' && text_[at_] != ')') {
      Tree part = single(depth);
      if (part->kind != Kind::assertion) part = repeated(std::move(part));
      all.parts.push_back(std::move(part));
    }
    return std::make_unique<Node>(std::move(all));
  }

  std::size_t number() {
    std::size_t value = 0;
    if (is_over() || !is_digit(static_cast<unsigned char>(text_[at_]))) fail("a number is missing");
    while (!is_over() && is_digit(static_cast<unsigned char>(text_[at_]))) {
      value = 10 * value + static_cast<std::size_t>(text_[at_++] - '0');
      if (value > kMaxRepeats) fail(detail::concat("more than ", kMaxRepeats, " repetitions"));
    }
    return value;
  }

  Tree repeated(Tree part) {
    std::size_t least = 0, most = kNone;
    if (takes("*")) {
    } else if (takes("+")) {
      least = 1;
    } else if (takes("?")) {
      most = 1;
    } else if (takes("{")) {
      least = most = number();
      if (takes(",")) most = !is_over() && text_[at_] == '}' ? kNone : number();
      if (!takes("}")) fail("a } is missing");
      if (most < least) fail("{m,n} with n below m");
    } else {
      return part;
    }
    Node node{.kind = Kind::repeat, .least = least, .most = most, .is_lazy = takes("?")};
    node.parts.push_back(std::move(part));
    if (!is_over() &&
        (text_[at_] == '*' || text_[at_] == '+' || text_[at_] == '?' || text_[at_] == '{'))
      fail("two repetitions behind each other");
    return std::make_unique<Node>(std::move(node));
  }

  Tree single(std::size_t depth) {
    const auto assertion = [](Op op) {
      return std::make_unique<Node>(Node{.kind = Kind::assertion, .assertion = op});
    };
    const char c = next();
    switch (c) {
      case '.':
        return set_of(letters_where([](unsigned char x) { return x != '\n' && x != '\r'; }));
      case '^': return assertion(Op::begin);
      case '$': return assertion(Op::end);
      case '[': return set_of(bracket());
      case '(': return group(depth);
      case '*':
      case '+':
      case '?':
      case '{': fail("nothing is there to repeat");
      case '\\':
        if (takes("b")) return assertion(Op::boundary);
        if (takes("B")) return assertion(Op::inside);
        return set_of(escape());
      default: return set_of(one(c));
    }
  }

  Tree group(std::size_t depth) {
    if (takes("?:")) {
      Tree inner = alternatives(depth + 1);
      if (!takes(")")) fail("a ) is missing");
      return inner;
    }
    if (takes("?")) fail("what looks ahead is not supported");
    if (++num_groups_ > Pattern::kMaxGroups)
      fail(detail::concat("more than ", Pattern::kMaxGroups, " groups"));
    Node node{.kind = Kind::group, .number = num_groups_};
    node.parts.push_back(alternatives(depth + 1));
    if (!takes(")")) fail("a ) is missing");
    return std::make_unique<Node>(std::move(node));
  }

  // Behind a backslash.
  Letters escape() {
    const char c = next();
    switch (c) {
      case 'd': return letters_where(is_digit);
      case 'D': return ~letters_where(is_digit);
      case 'w': return letters_where(is_word);
      case 'W': return ~letters_where(is_word);
      case 's': return letters_where(is_space);
      case 'S': return ~letters_where(is_space);
      case 't': return one('\t');
      case 'n': return one('\n');
      case 'r': return one('\r');
      case 'f': return one('\f');
      case 'v': return one('\v');
      default:
        if (is_digit(static_cast<unsigned char>(c))) fail("\\1 and the like are not supported");
        if (is_word(static_cast<unsigned char>(c))) fail(std::string("\\") + c + " means nothing");
        return one(c);
    }
  }

  Letters bracket() {
    const bool is_negated = takes("^");
    Letters set;
    while (!takes("]")) {
      const auto part = [&] { return takes("\\") ? escape() : one(next()); };
      const Letters first = part();
      if (!text_.substr(at_).starts_with("-") || text_.substr(at_).starts_with("-]")) {
        set |= first;
        continue;
      }
      ++at_;
      const Letters last = part();
      if (first.count() != 1 || last.count() != 1)
        fail("a range between things that are no letters");
      const auto letter = [](const Letters& set) {
        std::size_t c = 0;
        while (!set[c]) ++c;
        return c;
      };
      const auto low = letter(first), high = letter(last);
      if (high < low) fail("a range that ends before it begins");
      for (auto c = low; c <= high; ++c) set.set(c);
    }
    return is_negated ? ~set : set;
  }

  std::size_t push(Pattern::Step step) {
    auto& program = to_.program_;
    if (program.size() >= Pattern::kMaxProgram)
      fail(detail::concat("its repetitions, written out, have more than ", Pattern::kMaxProgram,
                          " steps"));
    program.push_back(step);
    return program.size() - 1;
  }
  std::size_t here() const { return to_.program_.size(); }
  // One way goes on behind the split, the other one is told later.
  std::size_t push_split() { return push({Op::split}); }
  void point(std::size_t split, std::size_t inside, std::size_t outside, bool is_lazy) {
    auto& step = to_.program_[split];
    step.x = is_lazy ? outside : inside;
    step.y = is_lazy ? inside : outside;
  }

  void emit(const Node& node) {
    switch (node.kind) {
      case Kind::set: push({Op::letter, node.number}); return;
      case Kind::assertion: push({node.assertion}); return;
      case Kind::sequence:
        for (const auto& part : node.parts) emit(*part);
        return;
      case Kind::group:
        push({Op::save, 2 * node.number});
        emit(*node.parts[0]);
        push({Op::save, 2 * node.number + 1});
        return;
      case Kind::choice: emit_choice(node); return;
      case Kind::repeat: emit_repeat(node); return;
    }
  }

  void emit_choice(const Node& node) {
    std::vector<std::size_t> ends;
    for (std::size_t i = 0; i < node.parts.size(); ++i) {
      const bool is_last = i + 1 == node.parts.size();
      const std::size_t split = is_last ? kNone : push_split();
      emit(*node.parts[i]);
      if (is_last) break;
      ends.push_back(push({Op::jump}));
      point(split, split + 1, here(), false);
    }
    for (const auto end : ends) to_.program_[end].x = here();
  }

  void emit_repeat(const Node& node) {
    for (std::size_t i = 0; i < node.least; ++i) emit(*node.parts[0]);
    if (node.most == kNone) {
      const auto split = push_split();
      emit(*node.parts[0]);
      push({Op::jump, split});
      point(split, split + 1, here(), node.is_lazy);
      return;
    }
    std::vector<std::size_t> splits;
    for (std::size_t i = node.least; i < node.most; ++i) {
      splits.push_back(push_split());
      emit(*node.parts[0]);
    }
    for (const auto split : splits) point(split, split + 1, here(), node.is_lazy);
  }

  std::string_view text_;
  Pattern& to_;
  std::size_t at_ = 0, num_groups_ = 0;
};

/// All ways through the program at once, the preferred one first: each step is in the list once, so
/// that a letter costs at most the length of the program.
class PatternMatcher {
 public:
  using Slots = std::vector<std::size_t>;

  PatternMatcher(const Pattern& pattern, std::string_view text)
      : p_(pattern), text_(text), seen_(pattern.program_.size(), 0) {}

  /// The slots of the first match from `from` on; empty where there is none.
  Slots search(std::size_t from) {
    Slots found;
    std::vector<Way> now, then;
    ++generation_;
    for (std::size_t at = from; at <= text_.size(); ++at) {
      // `now` holds what was reached before this letter; a match that begins here comes last.
      if (found.empty()) {
        Slots fresh(2 * (p_.num_groups_ + 1), kNone);
        follow(0, at, fresh, now);
      }
      if (now.empty() && !found.empty()) break;
      ++generation_;
      then.clear();
      for (const Way& way : now) {
        const auto& step = p_.program_[way.step];
        if (step.op == Op::match) {
          found = way.slots;
          break;  // those behind it are not preferred
        }
        if (at < text_.size() && p_.sets_[step.x][static_cast<unsigned char>(text_[at])]) {
          Slots slots = way.slots;
          follow(way.step + 1, at + 1, slots, then);
        }
      }
      std::swap(now, then);
    }
    return found;
  }

 private:
  using Op = Pattern::Op;
  struct Way {
    std::size_t step;
    Slots slots;
  };
  // A step that is still to follow, or a slot that gets its old value back.
  struct Pending {
    std::size_t step, slot, old;
  };

  bool is_word_at(std::size_t at) const {
    return at < text_.size() && is_word(static_cast<unsigned char>(text_[at]));
  }
  bool holds(Op op, std::size_t at) const {
    const bool is_boundary = (at > 0 && is_word_at(at - 1)) != is_word_at(at);
    switch (op) {
      case Op::begin: return at == 0;
      case Op::end: return at == text_.size();
      case Op::boundary: return is_boundary;
      default: return !is_boundary;
    }
  }

  // Adds the steps that can be reached from this one without a letter.
  void follow(std::size_t first, std::size_t at, Slots& slots, std::vector<Way>& to) {
    std::vector<Pending> pending{{first, kNone, 0}};
    while (!pending.empty()) {
      const Pending next = pending.back();
      pending.pop_back();
      if (next.slot != kNone) {
        slots[next.slot] = next.old;
        continue;
      }
      if (seen_[next.step] == generation_) continue;
      seen_[next.step] = generation_;
      MOESH_CHECK(++work_ <= Pattern::kMaxWork, ErrorKind::config, "a regular expression of ",
                  p_.program_.size(), " steps takes too long on a text of ", text_.size(),
                  " letters; choose a simpler one");
      const auto& step = p_.program_[next.step];
      switch (step.op) {
        case Op::letter:
        case Op::match: to.push_back({next.step, slots}); break;
        case Op::jump: pending.push_back({step.x, kNone, 0}); break;
        case Op::split:
          pending.push_back({step.y, kNone, 0});
          pending.push_back({step.x, kNone, 0});
          break;
        case Op::save:
          pending.push_back({0, step.x, slots[step.x]});
          slots[step.x] = at;
          pending.push_back({next.step + 1, kNone, 0});
          break;
        default:
          if (holds(step.op, at)) pending.push_back({next.step + 1, kNone, 0});
      }
    }
  }

  const Pattern& p_;
  std::string_view text_;
  std::vector<std::uint64_t> seen_;  // the generation of the list in which a step was seen last
  std::uint64_t generation_ = 1, work_ = 0;
};

Pattern::Pattern(std::string_view text) {
  MOESH_CHECK(text.size() <= kMaxLength, ErrorKind::config, shown(text),
              " is not a regular expression that is read: it has ", text.size(),
              " characters; at most ", kMaxLength, " are");
  PatternCompiler(text, *this).run();
}

namespace {

void append(std::string& to, std::string_view replacement, std::string_view text,
            const std::vector<std::size_t>& slots) {
  const auto group = [&](std::size_t n) {
    if (2 * n + 1 < slots.size() && slots[2 * n] != kNone && slots[2 * n + 1] != kNone)
      to += text.substr(slots[2 * n], slots[2 * n + 1] - slots[2 * n]);
  };
  for (std::size_t i = 0; i < replacement.size(); ++i) {
    const char next = i + 1 < replacement.size() ? replacement[i + 1] : '\0';
    if (replacement[i] != '$' ||
        !(next == '$' || next == '&' || is_digit(static_cast<unsigned char>(next)))) {
      to += replacement[i];
      continue;
    }
    ++i;
    if (next == '$') {
      to += '$';
    } else if (next == '&') {
      group(0);
    } else {
      std::size_t n = static_cast<std::size_t>(next - '0');
      if (i + 1 < replacement.size() && is_digit(static_cast<unsigned char>(replacement[i + 1])))
        n = 10 * n + static_cast<std::size_t>(replacement[++i] - '0');
      group(n);
    }
  }
}

}  // namespace

bool Pattern::is_in(std::string_view text) const {
  return !PatternMatcher(*this, text).search(0).empty();
}

std::string Pattern::replace(std::string_view text, std::string_view replacement) const {
  constexpr std::size_t kMaxResult = 1 << 24;
  PatternMatcher matcher(*this, text);
  std::string result;
  std::size_t at = 0;
  while (at <= text.size()) {
    const auto slots = matcher.search(at);
    if (slots.empty()) break;
    const std::size_t begin = slots[0], end = slots[1];
    result += text.substr(at, begin - at);
    append(result, replacement, text, slots);
    MOESH_CHECK(result.size() <= kMaxResult, ErrorKind::config, "a replacement makes a name of ",
                text.size(), " letters longer than ", kMaxResult);
    at = end;
    if (begin == end) {  // nothing was matched: the letter stays, or the search would not go on
      if (at < text.size()) result += text[at];
      ++at;
    }
  }
  if (at < text.size()) result += text.substr(at);
  return result;
}

}  // namespace moesh::formats
