#pragma once
// From the tokens of ids back to a text.

#include <string>
#include <variant>
#include <vector>

#include "moesh/tokenizer/normalizer.h"
#include "moesh/tokenizer/sections.h"

namespace moesh::tokenizer {

class TokenDecoder {
 public:
  TokenDecoder() = default;  // tokens with spaces between them
  explicit TokenDecoder(const JsonSection& section);
  std::string decode(std::vector<std::string> tokens) const;

 private:
  struct ByteLevel {};
  struct ByteFallback {};
  struct Fuse {};
  struct Strip {
    char32_t content;
    std::size_t start, stop;
  };
  struct MetaspaceDecoder {
    char32_t replacement;
    bool has_prefix;
  };
  using TokenTexts = std::vector<std::string>;
  using Step = std::variant<ByteLevel, ByteFallback, Fuse, Strip, MetaspaceDecoder, Replacement>;

  void add(const JsonSection& section);
  static TokenTexts run(const ByteLevel& step, const TokenTexts& tokens);
  static TokenTexts run(const ByteFallback& step, const TokenTexts& tokens);
  static TokenTexts run(const Fuse& step, const TokenTexts& tokens);
  static TokenTexts run(const Strip& step, const TokenTexts& tokens);
  static TokenTexts run(const MetaspaceDecoder& step, const TokenTexts& tokens);
  static TokenTexts run(const Replacement& step, const TokenTexts& tokens);

  bool is_given_ = false;
  std::vector<Step> steps_;
};

}  // namespace moesh::tokenizer
