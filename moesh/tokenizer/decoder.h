#pragma once
// From the tokens of ids back to a text.

#include <functional>
#include <string>
#include <vector>

#include "moesh/tokenizer/sections.h"

namespace moesh::tokenizer {

class TokenDecoder {
 public:
  TokenDecoder() = default;  // tokens with spaces between them
  explicit TokenDecoder(const JsonSection& section);
  std::string decode(std::vector<std::string> tokens) const;

 private:
  using TokenTexts = std::vector<std::string>;
  using Step = std::function<TokenTexts(const TokenTexts& tokens)>;

  void add(const JsonSection& section);

  bool is_given_ = false;
  std::vector<Step> steps_;
};

}  // namespace moesh::tokenizer
