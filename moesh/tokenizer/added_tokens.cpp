#include "moesh/tokenizer/added_tokens.h"

#include <algorithm>
#include <limits>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/name.h"

namespace moesh::tokenizer {
namespace {

constexpr std::uint32_t kIsWord = 1, kIsSpace = 2;

// The code point that ends at `end`.
char32_t last_code_point(std::string_view text, std::size_t end, std::size_t& begin) {
  begin = end;
  do --begin;
  while (is_continuation(text[begin]));
  const char* at = text.data() + begin;
  return next_code_point(at);
}

}  // namespace

void Trie::add(std::string_view text, std::int32_t value) {
  starts_[static_cast<unsigned char>(text[0])] = true;
  std::size_t node = 0;
  for (const char byte : text) {
    const auto [entry, is_new] =
        nodes_[node].next.try_emplace(byte, static_cast<std::int32_t>(nodes_.size()));
    node = static_cast<std::size_t>(entry->second);
    if (is_new) nodes_.emplace_back();
  }
  nodes_[node].value = value;
}

std::optional<Trie::TrieMatch> Trie::find(std::string_view text, std::size_t from) const {
  for (std::size_t begin = from; begin < text.size(); ++begin) {
    if (!starts_[static_cast<unsigned char>(text[begin])]) continue;
    std::optional<TrieMatch> longest;
    std::size_t node = 0;
    for (std::size_t i = begin; i < text.size(); ++i) {
      const auto next = nodes_[node].next.find(text[i]);
      if (next == nodes_[node].next.end()) break;
      node = static_cast<std::size_t>(next->second);
      if (nodes_[node].value >= 0) longest = {begin, i + 1, nodes_[node].value};
    }
    if (longest) return longest;
  }
  return std::nullopt;
}

AddedToken AddedTokens::read(const JsonSection& section) {
  section.allow({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  const auto flag = [&](const char* key) { return section.at(key).as_bool(section.name_of(key)); };
  const std::int64_t id = section.at("id").as_int(section.name_of("id"));
  MOESH_CHECK(id >= 0 && id < std::numeric_limits<TokenId>::max(), ErrorKind::data,
              section.name_of("id"), " is ", id);
  return {.content = section.text("content"),
          .id = static_cast<TokenId>(id),
          .single_word = flag("single_word"),
          .lstrip = flag("lstrip"),
          .rstrip = flag("rstrip"),
          .normalized = flag("normalized"),
          .special = flag("special")};
}

AddedTokens::AddedTokens(const std::vector<JsonSection>& list, const Bpe& model,
                         const Normalizer& normalizer) {
  // A token that is not in the vocabulary gets the next id behind it, whatever the file says.
  std::unordered_map<std::string, std::size_t> known;
  auto next_id = static_cast<TokenId>(model.vocabulary().size());
  std::string buffers[2];
  for (const JsonSection& section : list) {
    AddedToken token = read(section);
    MOESH_CHECK(!token.content.empty(), ErrorKind::data, section.name(), ".content is empty");
    MOESH_CHECK(known.try_emplace(token.content, all_.size()).second, ErrorKind::data,
                section.name(), ": ", formats::shown(token.content), " is there twice");
    const auto found = model.vocabulary().find(token.content);
    const TokenId id = found != model.vocabulary().end() ? found->second : next_id++;
    MOESH_CHECK(id == token.id, ErrorKind::data, section.name(), ": ",
                formats::shown(token.content), " has the id ", token.id,
                ", and where the vocabulary ends or has it, it is ", id, "; make both agree");
    token.pattern = token.content;
    if (token.normalized) token.pattern = normalizer.apply(token.content, buffers);
    if (!token.pattern.empty())
      (token.normalized ? normalized_ : plain_)
          .add(token.pattern, static_cast<std::int32_t>(all_.size()));
    all_.push_back(std::move(token));
  }
  const CodePointSet sets[] = {CodePointSet(tables::kWords), CodePointSet(tables::kSpaces)};
  words_and_spaces_ = CodePointMasks(sets);
}

void AddedTokens::split(std::string_view text, bool normalized,
                        std::vector<TextPiece>& pieces) const {
  const Trie& trie = normalized ? normalized_ : plain_;
  std::size_t done = 0;
  const auto is = [&](char32_t c, std::uint32_t kind) {
    return (words_and_spaces_[c] & kind) != 0;
  };
  const auto code_point_at = [&](std::size_t i) {
    const char* at = text.data() + i;
    return next_code_point(at);
  };
  const auto add_text = [&](std::size_t end) {
    if (end > done) pieces.push_back({text.substr(done, end - done)});
  };
  for (std::optional<Trie::TrieMatch> found;
       !trie.empty() && (found = trie.find(text, found ? found->end : 0));) {
    const AddedToken& token = all_[static_cast<std::size_t>(found->value)];
    std::size_t begin = found->begin, end = found->end, before;
    if (token.single_word) {
      if (begin > 0 && is(last_code_point(text, begin, before), kIsWord)) continue;
      if (end < text.size() && is(code_point_at(end), kIsWord)) continue;
    }
    if (token.lstrip) {
      while (begin > 0 && is(last_code_point(text, begin, before), kIsSpace)) begin = before;
      begin = std::max(begin, done);
    }
    if (token.rstrip)
      while (end < text.size() && is(code_point_at(end), kIsSpace)) {
        const char* at = text.data() + end;
        next_code_point(at);
        end = static_cast<std::size_t>(at - text.data());
      }
    add_text(begin);
    pieces.push_back({text.substr(begin, end - begin), token.id});
    done = end;
  }
  add_text(text.size());
}

}  // namespace moesh::tokenizer
