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
  using Tokens = std::vector<std::string>;
  using Step = std::variant<ByteLevel, ByteFallback, Fuse, Strip, MetaspaceDecoder, Replacement>;

  void add(const JsonSection& section);
  static Tokens run(const ByteLevel& step, const Tokens& tokens);
  static Tokens run(const ByteFallback& step, const Tokens& tokens);
  static Tokens run(const Fuse& step, const Tokens& tokens);
  static Tokens run(const Strip& step, const Tokens& tokens);
  static Tokens run(const MetaspaceDecoder& step, const Tokens& tokens);
  static Tokens run(const Replacement& step, const Tokens& tokens);

  bool is_given_ = false;
  std::vector<Step> steps_;
};

}  // namespace moesh::tokenizer
