#include "moesh/tokenizer/normalizer.h"

#include "moesh/base/error.h"
#include "moesh/base/utf8.h"

namespace moesh::tokenizer {

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
    if (type == "NFC")
      steps_.push_back(Nfc{});
    else
      steps_.push_back(Nfd{});
  } else if (type == "Prepend") {
    section.allow({"prepend"});
    steps_.push_back(Prepend{section.text("prepend")});
  } else if (type == "Replace") {
    steps_.push_back(Replacement(section));
  } else {
    section.refuse_type("NFC, NFD, Prepend, Replace and Sequence");
  }
}

std::string_view Normalizer::run(const Step& step, std::string_view text, std::string& buffer,
                                 Origins* origins) {
  if (std::holds_alternative<Nfc>(step)) return to_nfc(text, buffer, origins);
  if (std::holds_alternative<Nfd>(step)) return to_nfd(text, buffer, origins);
  if (const auto* replacement = std::get_if<Replacement>(&step))
    return replacement->apply(text, buffer, origins);
  if (text.empty()) return text;
  buffer = std::get<Prepend>(step).text;
  replace(origins, 0, first_character(text), buffer.size());
  keep(origins, 0, text.size());
  buffer += text;
  return buffer;
}

std::string_view Normalizer::apply(std::string_view text, std::string (&buffers)[2],
                                   Origins* origins) const {
  int free = 0;
  if (origins) origins->clear();
  for (const Step& step : steps_) {
    Origins of_step;
    const std::string_view result = run(step, text, buffers[free], origins ? &of_step : nullptr);
    if (result.data() == buffers[free].data()) {
      free = 1 - free;
      if (origins) *origins = after(*origins, std::move(of_step));
    }
    text = result;
  }
  return text;
}

}  // namespace moesh::tokenizer
