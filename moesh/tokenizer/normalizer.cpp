#include "moesh/tokenizer/normalizer.h"

#include <algorithm>
#include <unordered_map>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/tokenizer/code_points.h"

namespace moesh::tokenizer {
namespace {

// Hangul syllables are composed by arithmetic (section 3.12 of the Unicode standard).
constexpr char32_t kS = 0xAC00, kL = 0x1100, kV = 0x1161, kT = 0x11A7;
constexpr char32_t kNumL = 19, kNumV = 21, kNumT = 28, kNumS = kNumL * kNumV * kNumT;

bool is_syllable(char32_t c) { return c >= kS && c < kS + kNumS; }

class Normalization {
 public:
  Normalization() {
    for (const auto& entry : tables::kCombiningClasses) classes_[entry.code_point] = entry.value;
    for (const auto& entry : tables::kDecompositions) {
      decompositions_[entry.code_point] = {entry.first, entry.second};
      if (entry.composes) compositions_[key(entry.first, entry.second)] = entry.code_point;
    }
    // Code points that may change, or change the one before.
    CodePointSet unsafe_c, unsafe_d;
    for (const auto& [c, value] : classes_) unsafe_c.add(c, c), unsafe_d.add(c, c);
    unsafe_c.add(kV, kV + kNumV - 1);
    unsafe_c.add(kT + 1, kT + kNumT - 1);
    unsafe_d.add(kS, kS + kNumS - 1);
    for (const auto& [pair, whole] : compositions_)
      unsafe_c.add(static_cast<char32_t>(pair & 0xFFFFFFFF),
                   static_cast<char32_t>(pair & 0xFFFFFFFF));
    for (const auto& [c, parts] : decompositions_) {
      unsafe_d.add(c, c);
      const bool composes = parts.second != 0 && composed(parts.first, parts.second) == c;
      if (!composes) unsafe_c.add(c, c);
    }
    const CodePointSet sets[] = {unsafe_c, unsafe_d};
    unsafe_ = CodePointMasks(sets);
  }

  bool is_safe(char32_t c, bool compose) const { return (unsafe_[c] & (compose ? 1 : 2)) == 0; }

  // Appends the normal form of code points.
  void add(const std::u32string& text, bool compose, std::string& to) const {
    std::u32string parts;
    for (const char32_t c : text) decompose(c, parts);
    put_in_order(parts);
    if (compose) put_together(parts);
    for (const char32_t c : parts) append_utf8(to, c);
  }

 private:
  static std::uint64_t key(char32_t a, char32_t b) { return std::uint64_t{a} << 32 | b; }
  int combining_class(char32_t c) const {
    const auto found = classes_.find(c);
    return found == classes_.end() ? 0 : found->second;
  }

  void decompose(char32_t c, std::u32string& to) const {
    if (is_syllable(c)) {
      const char32_t s = c - kS;
      to += {kL + s / (kNumV * kNumT), kV + s % (kNumV * kNumT) / kNumT};
      if (s % kNumT != 0) to += kT + s % kNumT;
      return;
    }
    const auto found = decompositions_.find(c);
    if (found == decompositions_.end()) {
      to += c;
      return;
    }
    decompose(found->second.first, to);
    if (found->second.second != 0) decompose(found->second.second, to);
  }

  // Runs of marks by class, stable.
  void put_in_order(std::u32string& text) const {
    for (std::size_t i = 0; i < text.size();) {
      std::size_t end = i;
      while (end < text.size() && combining_class(text[end]) != 0) ++end;
      std::stable_sort(
          text.begin() + static_cast<std::ptrdiff_t>(i),
          text.begin() + static_cast<std::ptrdiff_t>(end),
          [&](char32_t a, char32_t b) { return combining_class(a) < combining_class(b); });
      i = end + 1;
    }
  }

  // The composition of two, or 0.
  char32_t composed(char32_t a, char32_t b) const {
    if (a >= kL && a < kL + kNumL && b >= kV && b < kV + kNumV)
      return kS + ((a - kL) * kNumV + (b - kV)) * kNumT;
    if (is_syllable(a) && (a - kS) % kNumT == 0 && b > kT && b < kT + kNumT) return a + (b - kT);
    const auto found = compositions_.find(key(a, b));
    return found == compositions_.end() ? 0 : found->second;
  }

  void put_together(std::u32string& text) const {
    constexpr std::size_t kNone = std::u32string::npos;
    std::size_t starter = kNone, kept = 0;
    int last_class = -1;  // of what stands between the starter and this one; -1: nothing does
    for (const char32_t c : text) {
      const int its_class = combining_class(c);
      if (starter != kNone && last_class < its_class)
        if (const char32_t whole = composed(text[starter], c)) {
          text[starter] = whole;
          continue;
        }
      if (its_class == 0) {
        starter = kept;
        last_class = -1;
      } else {
        last_class = its_class;
      }
      text[kept++] = c;
    }
    text.resize(kept);
  }

  std::unordered_map<char32_t, int> classes_;
  std::unordered_map<char32_t, std::pair<char32_t, char32_t>> decompositions_;
  std::unordered_map<std::uint64_t, char32_t> compositions_;
  CodePointMasks unsafe_;
};

// Canonical: composed or decomposed.
std::string_view normal_form(std::string_view text, bool compose, std::string& buffer,
                             Origins* origins) {
  static const Normalization normalization;
  const char *at = text.data(), *const end = at + text.size();
  // A safe code point never changes with what is before it. So a piece begins at one, and goes on
  // while others are not safe; a piece of one stays as it is.
  const char* copied = at;  // up to here the buffer has it
  const char* begin = at;   // of the piece
  bool changed = false;
  const auto place = [&](const char* of) { return static_cast<std::size_t>(of - text.data()); };
  while (at < end) {
    const char* next = at;
    if (const char32_t c = next_code_point(next); normalization.is_safe(c, compose)) {
      begin = at;
      at = next;
      continue;
    }
    while (next < end) {
      const char* behind = next;
      if (normalization.is_safe(next_code_point(behind), compose)) break;
      next = behind;
    }
    if (!changed) buffer.clear();
    changed = true;
    buffer.append(copied, begin);
    keep(origins, place(copied), place(begin));
    const std::size_t before = buffer.size();
    normalization.add(code_points({begin, next}), compose, buffer);
    // What a piece begins with may stay as it is: a newline, where marks behind it change.
    const char* same =
        std::mismatch(begin, next, buffer.data() + before, buffer.data() + buffer.size()).first;
    while (same < next && is_continuation(*same)) --same;  // to whole characters
    keep(origins, place(begin), place(same));
    replace(origins, place(same), place(next),
            buffer.size() - before - (place(same) - place(begin)));
    copied = begin = at = next;
  }
  if (!changed) return text;
  buffer.append(copied, end);
  keep(origins, place(copied), place(end));
  return buffer;
}

}  // namespace

std::variant<std::string, SplitPattern> read_what_to_find(const JsonSection& section) {
  const JsonSection what(section.at("pattern"), section.name_of("pattern"));
  what.allow({"String", "Regex"});
  if (what.find("Regex")) return SplitPattern(what.text("Regex"), what.name());
  const std::string& text = what.text("String");
  MOESH_CHECK(!text.empty(), ErrorKind::data, what.name(), ".String is empty");
  return text;
}

Occurrences::Occurrences(const std::variant<std::string, SplitPattern>& what, std::string_view text)
    : literal_(std::get_if<std::string>(&what)), text_(text) {
  if (!literal_) matches_.emplace(std::get<SplitPattern>(what), text);
}

std::optional<Match> Occurrences::next(std::size_t from) {
  if (matches_) return matches_->next(from);
  const std::size_t at = text_.find(*literal_, from);
  if (at == std::string_view::npos) return std::nullopt;
  return Match{at, at + literal_->size()};
}

Replacement::Replacement(const JsonSection& section)
    : what_(read_what_to_find(section)), content_(section.text("content")) {
  section.allow({"pattern", "content"});
}

std::string_view Replacement::apply(std::string_view text, std::string& buffer,
                                    Origins* origins) const {
  Occurrences all(what_, text);
  auto match = all.next(0);
  if (!match) return text;
  buffer.clear();
  std::size_t copied = 0;
  for (; match; match = all.next(copied)) {
    buffer += text.substr(copied, match->begin - copied);
    keep(origins, copied, match->begin);
    buffer += content_;
    replace(origins, match->begin, match->end, content_.size());
    copied = match->end;
  }
  buffer += text.substr(copied);
  keep(origins, copied, text.size());
  return buffer;
}

Normalizer::Normalizer(const JsonSection& section) { add(section); }

void Normalizer::add(const JsonSection& section) {
  const std::string& type = section.type();
  if (type == "Sequence") {
    section.allow({"normalizers"});
    for (const JsonSection& one : section.list("normalizers")) add(one);
  } else if (type == "NFC" || type == "NFD") {
    section.allow({});
    steps_.emplace_back(
        [compose = type == "NFC"](std::string_view text, std::string& buffer, Origins* origins) {
          return normal_form(text, compose, buffer, origins);
        });
  } else if (type == "Prepend") {
    section.allow({"prepend"});
    steps_.emplace_back([prefix = section.text("prepend")](std::string_view text,
                                                           std::string& buffer, Origins* origins) {
      if (text.empty()) return text;
      buffer = prefix;
      replace(origins, 0, first_character(text), buffer.size());
      keep(origins, 0, text.size());
      buffer += text;
      return std::string_view(buffer);
    });
  } else if (type == "Replace") {
    steps_.emplace_back(
        [by = Replacement(section)](std::string_view text, std::string& buffer, Origins* origins) {
          return by.apply(text, buffer, origins);
        });
  } else {
    section.refuse_type("NFC, NFD, Prepend, Replace and Sequence");
  }
}

std::string_view Normalizer::apply(std::string_view text, std::string (&buffers)[2],
                                   Origins* origins) const {
  int free = 0;
  if (origins) origins->clear();
  for (const Step& step : steps_) {
    Origins of_step;
    const std::string_view result = step(text, buffers[free], origins ? &of_step : nullptr);
    if (result.data() == buffers[free].data()) {
      free = 1 - free;
      if (origins) *origins = after(*origins, std::move(of_step));
    }
    text = result;
  }
  return text;
}

}  // namespace moesh::tokenizer
