#pragma once
// A tokenizer of 97 tokens for tests: printable ASCII, a space, a line end, and "se".

#include <string>

namespace moesh {

inline std::string small_tokenizer_json() {
  std::string vocab;
  int id = 0;
  const auto add = [&](const std::string& token) {
    vocab += (vocab.empty() ? "\"" : ",\"") + token + "\":" + std::to_string(id++);
  };
  for (char c = '!'; c <= '~'; ++c)
    add(c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c));
  add("\xC4\xA0"), add("\xC4\x8A"), add("se");  // how byte-level BPE writes a space and a line end
  return R"({"added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel",)"
         R"("add_prefix_space":false,"use_regex":true},"decoder":{"type":"ByteLevel"},)"
         R"("model":{"type":"BPE","vocab":{)" +
         vocab + R"(},"merges":[["s","e"]]}})";
}

}  // namespace moesh
