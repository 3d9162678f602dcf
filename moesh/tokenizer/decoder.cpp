#include "moesh/tokenizer/decoder.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/name.h"
#include "moesh/tokenizer/bpe.h"
#include "moesh/tokenizer/normalizer.h"

namespace moesh::tokenizer {
namespace {

using TokenTexts = std::vector<std::string>;

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

TokenTexts decode_letters(const TokenTexts& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) bytes += bytes_of_letters(token).value_or(token);
  return {with_replacements(bytes)};
}

TokenTexts join_bytes(const TokenTexts& tokens) {
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

TokenTexts strip(const TokenTexts& tokens, char32_t content, std::size_t start, std::size_t stop) {
  TokenTexts result;
  for (const std::string& token : tokens) {
    std::u32string text = code_points(token);
    std::size_t begin = 0, end = text.size();
    while (begin < std::min(start, text.size()) && text[begin] == content) ++begin;
    while (text.size() - end < stop && end > begin && text[end - 1] == content) --end;
    std::string& stripped = result.emplace_back();
    for (std::size_t i = begin; i < end; ++i) append_utf8(stripped, text[i]);
  }
  return result;
}

TokenTexts with_spaces(const TokenTexts& tokens, char32_t replacement, bool has_prefix) {
  TokenTexts result;
  for (const std::string& token : tokens) {
    const bool drops = result.empty() && has_prefix;
    std::string& text = result.emplace_back();
    for (const char32_t c : code_points(token))
      if (c != replacement)
        append_utf8(text, c);
      else if (!drops)
        text += ' ';
  }
  return result;
}

TokenTexts replaced(const TokenTexts& tokens, const Replacement& by) {
  TokenTexts result;
  std::string buffer;
  for (const std::string& token : tokens) result.emplace_back(by.apply(token, buffer));
  return result;
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
    steps_.emplace_back(decode_letters);
  } else if (type == "ByteFallback") {
    section.allow({});
    steps_.emplace_back(join_bytes);
  } else if (type == "Fuse") {
    section.allow({});
    steps_.emplace_back([](const TokenTexts& tokens) { return TokenTexts{joined(tokens, "")}; });
  } else if (type == "Strip") {
    section.allow({"content", "start", "stop"});
    steps_.emplace_back([content = read_character(section, "content"), start = count("start"),
                         stop = count("stop")](const TokenTexts& tokens) {
      return strip(tokens, content, start, stop);
    });
  } else if (type == "Metaspace") {
    section.allow({"replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
    steps_.emplace_back([replacement = read_character(section, "replacement"),
                         has_prefix = section.text_or("prepend_scheme", "always") !=
                                      "never"](const TokenTexts& tokens) {
      return with_spaces(tokens, replacement, has_prefix);
    });
  } else if (type == "Replace") {
    steps_.emplace_back(
        [by = Replacement(section)](const TokenTexts& tokens) { return replaced(tokens, by); });
  } else {
    section.refuse_type("ByteLevel, ByteFallback, Fuse, Strip, Metaspace, Replace and Sequence");
  }
}

std::string TokenDecoder::decode(std::vector<std::string> tokens) const {
  if (!is_given_) return joined(tokens, " ");
  for (const Step& step : steps_) tokens = step(tokens);
  return joined(tokens, "");
}

}  // namespace moesh::tokenizer
