// 'r' and a whole tokenizer.json; or any other byte, a pattern, a zero byte and a text.

#include <string>

#include "moesh/base/text.h"
#include "moesh/tokenizer/tokenizer.h"
#include "tests/fuzz/fuzz.h"

namespace moesh::fuzz {
namespace {

using namespace moesh::tokenizer;

void check(const Tokenizer& tokenizer) {
  EncodeBuffers buffers{.cache = WordCache(/*bits=*/4)};
  const auto encode = [&](std::string_view text) {
    std::vector<TokenId> ids;
    tokenizer.encode(text, /*with_template=*/true, buffers, ids);
    return ids;
  };
  for (const std::string_view text :
       {"", "a", "ab <s> \xE2\x96\x81 12 \xC3\xA9\xCC\x81's\n\n  x", "\xF0\x9F\x98\x80"}) {
    const auto ids = unless_refused([&] { return encode(text); });
    if (!ids) continue;
    for (const TokenId id : *ids)
      must(id >= 0 && id < tokenizer.vocab_size(), "an id is in the vocabulary");
    must(ids == encode(text), "a text has the same ids each time");
    must(find_bad_utf8(tokenizer.decode(*ids)) == std::string::npos, "what is decoded is UTF-8");
  }
}

void check(const SplitPattern& pattern, std::string_view text) {
  Matches matches(pattern, text);
  std::size_t from = 0;
  while (const auto match = matches.next(from)) {
    must(match->begin >= from && match->end > match->begin && match->end <= text.size(),
         "a match is behind the last one, and not empty");
    must(match->end == text.size() || !is_continuation(text[match->end]),
         "a match ends with a character");
    from = match->end;
  }
}

}  // namespace
}  // namespace moesh::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  const Input input(data, size);
  if (input.raw) {
    if (const auto tokenizer =
            unless_refused([&] { return Tokenizer(input.rest, "tokenizer.json"); }))
      check(*tokenizer);
    return 0;
  }
  const std::size_t zero = input.rest.find('\0');
  if (zero == std::string_view::npos) return 0;
  const std::string_view text = input.rest.substr(zero + 1, 16);
  if (moesh::find_bad_utf8(text) != std::string_view::npos) return 0;
  if (const auto pattern =
          unless_refused([&] { return SplitPattern(input.rest.substr(0, zero), "p"); }))
    unless_refused([&] { return check(*pattern, text), true; });
  return 0;
}
