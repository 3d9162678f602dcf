#include "moesh/tokenizer/decoder.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/name.h"
#include "moesh/tokenizer/bpe.h"

namespace moesh::tokenizer {
namespace {

char32_t read_character(const JsonSection& section, const char* key) {
  const std::u32string text = code_points(section.text(key));
  MOESH_CHECK(text.size() == 1, ErrorKind::data, section.name_of(key), " is ",
              formats::shown(section.text(key)), "; it is one character");
  return text[0];
}

std::string joined(const std::vector<std::string>& tokens, std::string_view between) {
  std::string text;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) text += between;
    text += tokens[i];
  }
  return text;
}

// The byte that "<0x0A>" stands for, or -1.
int byte_of(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int value = 0;
  for (const char c : {token[3], token[4]}) {
    const char lower = static_cast<char>(c | 0x20);
    if (c >= '0' && c <= '9')
      value = value * 16 + (c - '0');
    else if (lower >= 'a' && lower <= 'f')
      value = value * 16 + (lower - 'a' + 10);
    else
      return -1;
  }
  return value;
}

}  // namespace

TokenDecoder::TokenDecoder(const JsonSection& section) : is_given_(true) { add(section); }

void TokenDecoder::add(const JsonSection& section) {
  const std::string& type = section.type();
  const auto count = [&](const char* key) {
    return static_cast<std::size_t>(section.at(key).as_size(section.name_of(key)));
  };
  if (type == "Sequence") {
    section.allow({"decoders"});
    for (const JsonSection& one : section.list("decoders")) add(one);
  } else if (type == "ByteLevel") {
    section.allow({"add_prefix_space", "trim_offsets", "use_regex"});
    steps_.push_back(ByteLevel{});
  } else if (type == "ByteFallback") {
    section.allow({});
    steps_.push_back(ByteFallback{});
  } else if (type == "Fuse") {
    section.allow({});
    steps_.push_back(Fuse{});
  } else if (type == "Strip") {
    section.allow({"content", "start", "stop"});
    steps_.push_back(Strip{read_character(section, "content"), count("start"), count("stop")});
  } else if (type == "Metaspace") {
    section.allow({"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
    steps_.push_back(MetaspaceDecoder{read_character(section, "replacement"),
                                      section.text_or("prepend_scheme", "always") != "never"});
  } else if (type == "Replace") {
    steps_.push_back(Replacement(section));
  } else {
    section.refuse_type("ByteLevel, ByteFallback, Fuse, Strip, Metaspace, Replace and Sequence");
  }
}

std::string TokenDecoder::decode(std::vector<std::string> tokens) const {
  if (!is_given_) return joined(tokens, " ");
  for (const Step& step : steps_)
    tokens = std::visit([&](const auto& s) { return run(s, tokens); }, step);
  return joined(tokens, "");
}

TokenDecoder::TokenTexts TokenDecoder::run(const ByteLevel&, const TokenTexts& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) bytes += bytes_of_letters(token).value_or(token);
  return {with_replacements(bytes)};
}

TokenDecoder::TokenTexts TokenDecoder::run(const ByteFallback&, const TokenTexts& tokens) {
  TokenTexts result;
  std::string bytes;
  const auto end_bytes = [&] {
    if (bytes.empty()) return;
    if (find_bad_utf8(bytes) == std::string::npos)
      result.push_back(bytes);
    else
      result.insert(result.end(), bytes.size(), "\xEF\xBF\xBD");
    bytes.clear();
  };
  for (const std::string& token : tokens) {
    if (const int byte = byte_of(token); byte >= 0) {
      bytes.push_back(static_cast<char>(byte));
      continue;
    }
    end_bytes();
    result.push_back(token);
  }
  end_bytes();
  return result;
}

TokenDecoder::TokenTexts TokenDecoder::run(const Fuse&, const TokenTexts& tokens) {
  return {joined(tokens, "")};
}

TokenDecoder::TokenTexts TokenDecoder::run(const Strip& step, const TokenTexts& tokens) {
  TokenTexts result;
  for (const std::string& token : tokens) {
    std::u32string text = code_points(token);
    std::size_t begin = 0, end = text.size();
    while (begin < std::min(step.start, text.size()) && text[begin] == step.content) ++begin;
    while (text.size() - end < step.stop && end > begin && text[end - 1] == step.content) --end;
    std::string& stripped = result.emplace_back();
    for (std::size_t i = begin; i < end; ++i) append_utf8(stripped, text[i]);
  }
  return result;
}

TokenDecoder::TokenTexts TokenDecoder::run(const MetaspaceDecoder& step, const TokenTexts& tokens) {
  TokenTexts result;
  for (const std::string& token : tokens) {
    const bool drops = result.empty() && step.has_prefix;
    std::string& text = result.emplace_back();
    for (const char32_t c : code_points(token))
      if (c != step.replacement)
        append_utf8(text, c);
      else if (!drops)
        text += ' ';
  }
  return result;
}

TokenDecoder::TokenTexts TokenDecoder::run(const Replacement& step, const TokenTexts& tokens) {
  TokenTexts result;
  std::string buffer;
  for (const std::string& token : tokens) result.emplace_back(step.apply(token, buffer));
  return result;
}

}  // namespace moesh::tokenizer
