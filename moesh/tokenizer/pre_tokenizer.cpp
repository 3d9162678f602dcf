#include "moesh/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <variant>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/name.h"
#include "moesh/tokenizer/code_points.h"
#include "moesh/tokenizer/normalizer.h"
#include "moesh/tokenizer/pattern.h"

namespace moesh::tokenizer {
namespace {

// The pattern of GPT-2, by which ByteLevel splits by where no pattern is given.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

CodePointMasks masks(std::span<const CodePointRange> ranges) {
  const CodePointSet set(ranges);
  return CodePointMasks({&set, 1});
}

enum class Behavior { removed, isolated, contiguous, merged_with_previous, merged_with_next };

Behavior read_behavior(const JsonSection& section, const char* otherwise) {
  const std::string name =
      *otherwise && !section.find("behavior") ? std::string(otherwise) : section.text("behavior");
  if (name == "Removed") return Behavior::removed;
  if (name == "Isolated") return Behavior::isolated;
  if (name == "Contiguous") return Behavior::contiguous;
  if (name == "MergedWithPrevious") return Behavior::merged_with_previous;
  if (name == "MergedWithNext") return Behavior::merged_with_next;
  throw Error(
      ErrorKind::data,
      detail::concat(section.name(), ": moesh does not know the behavior ", formats::shown(name),
                     "; it knows Removed, Isolated, Contiguous, MergedWithPrevious and "
                     "MergedWithNext"));
}

struct MatchedText {
  std::size_t begin, end;
  bool is_match;
};

// Adds to `parts` in the order that it is given them. The rules for several matches in a row are
// those of the package: only the first of them is merged.
void add_parts(const std::vector<MatchedText>& parts, Behavior behavior, const Word& word,
               std::vector<Word>& to) {
  std::vector<MatchedText> result;
  bool previous = false;
  const auto merge_unless = [&](const MatchedText& part, bool is_new) {
    if (is_new || result.empty()) {
      result.push_back(part);
    } else {
      result.back().begin = std::min(result.back().begin, part.begin);
      result.back().end = std::max(result.back().end, part.end);
    }
    previous = part.is_match;
  };
  switch (behavior) {
    case Behavior::isolated: result = parts; break;
    case Behavior::removed:
      std::copy_if(parts.begin(), parts.end(), std::back_inserter(result),
                   [](const MatchedText& part) { return !part.is_match; });
      break;
    case Behavior::contiguous:
      for (const MatchedText& part : parts) merge_unless(part, part.is_match != previous);
      break;
    case Behavior::merged_with_previous:
      for (const MatchedText& part : parts) merge_unless(part, !part.is_match || previous);
      break;
    case Behavior::merged_with_next:
      for (auto part = parts.rbegin(); part != parts.rend(); ++part)
        merge_unless(*part, !part->is_match || previous);
      std::reverse(result.begin(), result.end());
      break;
  }
  for (const MatchedText& part : result)
    to.push_back({word.text.substr(part.begin, part.end - part.begin),
                  word.at_start && part.begin == 0, word.changed});
}

struct Split {
  std::variant<std::string, SplitPattern> what;
  Behavior behavior;
  bool invert = false;

  void operator()(const Word& word, WordBuffers& buffers) const;
};

void Split::operator()(const Word& word, WordBuffers& buffers) const {
  Occurrences all(what, word.text);
  if (behavior == Behavior::isolated) {  // nearly always, so without a list of parts
    const auto add = [&](std::size_t begin, std::size_t end) {
      if (end > begin)
        buffers.words.push_back(
            {word.text.substr(begin, end - begin), word.at_start && begin == 0, word.changed});
    };
    std::size_t done = 0;
    while (const auto match = all.next(done)) {
      add(done, match->begin);
      add(match->begin, match->end);
      done = match->end;
    }
    return add(done, word.text.size());
  }
  std::vector<MatchedText> parts;
  std::size_t done = 0;
  while (const auto match = all.next(done)) {
    if (match->begin > done) parts.push_back({done, match->begin, invert});
    parts.push_back({match->begin, match->end, !invert});
    done = match->end;
  }
  if (done < word.text.size()) parts.push_back({done, word.text.size(), invert});
  add_parts(parts, behavior, word, buffers.words);
}

// The same for single code points of a set.
struct SetSplit {
  CodePointMasks set;
  Behavior behavior;

  void operator()(const Word& word, WordBuffers& buffers) const;
};

void SetSplit::operator()(const Word& word, WordBuffers& buffers) const {
  std::vector<MatchedText> parts;
  const char* const data = word.text.data();
  const char* const end = data + word.text.size();
  std::size_t done = 0;
  for (const char* at = data; at < end;) {
    const auto begin = static_cast<std::size_t>(at - data);
    if (set[next_code_point(at)] == 0) continue;
    if (begin > done) parts.push_back({done, begin, false});
    done = static_cast<std::size_t>(at - data);
    parts.push_back({begin, done, true});
  }
  if (done < word.text.size()) parts.push_back({done, word.text.size(), false});
  add_parts(parts, behavior, word, buffers.words);
}

// Words, and other characters that are not white space.
struct WordsAndOthers {
  CodePointMasks sets;

  void operator()(const Word& word, WordBuffers& buffers) const;
};

void WordsAndOthers::operator()(const Word& word, WordBuffers& buffers) const {
  const char* const data = word.text.data();
  const char* const end = data + word.text.size();
  constexpr std::uint32_t kSpace = 2;
  for (const char* at = data; at < end;) {
    const char* const begin = at;
    const std::uint32_t kind = sets[next_code_point(at)];
    for (const char* next = at; next < end; at = next)
      if (sets[next_code_point(next)] != kind) break;
    if (kind != kSpace)
      buffers.words.push_back({{begin, at}, word.at_start && begin == data, word.changed});
  }
}

// A prefix stands for the first character of the word.
ChangedText& change(const Word& word, WordBuffers& buffers, std::string_view prefix,
                    std::string_view for_space = " ") {
  ChangedText& changed = buffers.changed.emplace_back();
  const auto replace = [&](ByteRange of, std::string_view text) {
    changed.text += text;
    if (buffers.keeps_origins)
      changed.origins.insert(changed.origins.end(), text.size(), buffers.origin(word, of));
  };
  replace({0, first_character(word.text)}, prefix);
  for (std::size_t done = 0; done <= word.text.size();) {
    const std::size_t space = std::min(word.text.find(' ', done), word.text.size());
    changed.text += word.text.substr(done, space - done);
    for (std::size_t i = done; buffers.keeps_origins && i < space; ++i)
      changed.origins.push_back(buffers.origin(word, {i, i + 1}));
    if (space < word.text.size()) replace({space, space + 1}, for_space);
    done = space + 1;
  }
  return changed;
}

void add_prefix_space(const Word& word, WordBuffers& buffers) {
  if (word.text.starts_with(' ')) return buffers.words.push_back(word);
  const ChangedText& changed = change(word, buffers, " ");
  buffers.words.push_back({changed.text, word.at_start, &changed});
}

struct Metaspace {
  std::string replacement;
  enum class PrependScheme { always, first, never } prepend;
  bool split;

  void operator()(const Word& word, WordBuffers& buffers) const;
};

Metaspace read_metaspace(const JsonSection& section) {
  section.allow({"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  Metaspace step{.replacement = section.text("replacement"), .split = section.flag("split", true)};
  MOESH_CHECK(code_points(step.replacement).size() == 1, ErrorKind::data, section.name(),
              ".replacement is ", formats::shown(step.replacement), "; it is one character");
  const std::string scheme = section.text_or("prepend_scheme", "always");
  using PrependScheme = Metaspace::PrependScheme;
  if (scheme == "always")
    step.prepend = PrependScheme::always;
  else if (scheme == "first")
    step.prepend = PrependScheme::first;
  else if (scheme == "never")
    step.prepend = PrependScheme::never;
  else
    throw Error(ErrorKind::data,
                detail::concat(section.name(), ".prepend_scheme is ", formats::shown(scheme),
                               "; moesh knows always, first and never"));
  MOESH_CHECK(section.flag("add_prefix_space", true) || step.prepend == PrependScheme::never,
              ErrorKind::data, section.name(),
              ": add_prefix_space is false, and prepend_scheme is ", scheme,
              ", which say different things");
  return step;
}

void Metaspace::operator()(const Word& word, WordBuffers& buffers) const {
  const bool wanted =
      prepend == PrependScheme::always || (prepend == PrependScheme::first && word.at_start);
  const bool is_there = word.text.starts_with(' ') || word.text.starts_with(replacement);
  const ChangedText& changed =
      change(word, buffers, wanted && !is_there ? replacement : "", replacement);
  const Word whole{changed.text, word.at_start, &changed};
  if (!split) return buffers.words.push_back(whole);
  Split{replacement, Behavior::merged_with_next}(whole, buffers);
}

}  // namespace

PreTokenizer::PreTokenizer(const JsonSection& section) { add(section); }

void PreTokenizer::add(const JsonSection& section) {
  const std::string& type = section.type();
  MOESH_CHECK(!is_byte_level_, ErrorKind::data, section.name(), ": ", formats::shown(type),
              " after ByteLevel, which moesh does not know; ByteLevel must come last");
  if (type == "Sequence") {
    section.allow({"pretokenizers"});
    for (const JsonSection& one : section.list("pretokenizers")) add(one);
  } else if (type == "Split") {
    section.allow({"pattern", "behavior", "invert"});
    steps_.push_back(Split{read_what_to_find(section), read_behavior(section, ""),
                           section.flag("invert", false)});
  } else if (type == "ByteLevel") {
    section.allow({"add_prefix_space", "trim_offsets", "use_regex"});
    if (section.flag("add_prefix_space", true)) steps_.emplace_back(add_prefix_space);
    if (section.flag("use_regex", true))
      steps_.push_back(Split{SplitPattern(kGpt2Pattern, section.name()), Behavior::isolated});
    is_byte_level_ = true;
  } else if (type == "Metaspace") {
    steps_.push_back(read_metaspace(section));
  } else if (type == "Digits") {
    section.allow({"individual_digits"});
    steps_.push_back(SetSplit{masks(tables::kNumeric), section.flag("individual_digits", false)
                                                           ? Behavior::isolated
                                                           : Behavior::contiguous});
  } else if (type == "Punctuation") {
    section.allow({"behavior"});
    steps_.push_back(SetSplit{masks(tables::kPunctuation), read_behavior(section, "Isolated")});
  } else if (type == "WhitespaceSplit") {
    section.allow({});
    steps_.push_back(SetSplit{masks(tables::kSpaces), Behavior::removed});
  } else if (type == "Whitespace") {
    section.allow({});
    const CodePointSet sets[] = {CodePointSet(tables::kWords), CodePointSet(tables::kSpaces)};
    steps_.push_back(WordsAndOthers{CodePointMasks(sets)});
  } else {
    section.refuse_type(
        "Split, ByteLevel, Metaspace, Digits, Punctuation, Whitespace, WhitespaceSplit and "
        "Sequence");
  }
}

void PreTokenizer::split(std::string_view text, bool at_start, WordBuffers& buffers) const {
  buffers.words.clear();
  buffers.changed.clear();
  buffers.text = text;
  if (text.empty()) return;
  buffers.words.push_back({text, at_start});
  for (const Step& step : steps_) {
    std::swap(buffers.words, buffers.others);
    buffers.words.clear();
    for (const Word& word : buffers.others) step(word, buffers);
  }
}

ByteRange WordBuffers::origin(const Word& word, ByteRange of) const {
  const std::string_view whole = word.changed ? word.changed->text : text;
  const auto before = static_cast<std::size_t>(word.text.data() - whole.data());
  of = {before + of.begin, before + of.end};
  return word.changed ? origin_of(word.changed->origins, of) : of;
}

}  // namespace moesh::tokenizer
