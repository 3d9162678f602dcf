#include "moesh/tokenizer/bpe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <queue>
#include <tuple>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/name.h"

namespace moesh::tokenizer {
namespace {

struct Letters {
  std::array<char32_t, 256> of_byte{};
  std::array<int, 0x144> byte_of{};  // -1: none

  Letters() {
    byte_of.fill(-1);
    char32_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool prints =
          (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      of_byte[b] = prints ? b : next++;
      byte_of[of_byte[b]] = static_cast<int>(b);
    }
  }
};
const Letters& letters() {
  static const Letters all;
  return all;
}

}  // namespace

char32_t letter_of_byte(unsigned char byte) { return letters().of_byte[byte]; }

std::optional<std::string> bytes_of_letters(std::string_view text) {
  const auto& byte_of = letters().byte_of;
  std::string bytes;
  for (const char *at = text.data(), *end = at + text.size(); at < end;) {
    const char32_t c = next_code_point(at);
    if (c >= byte_of.size() || byte_of[c] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte_of[c]));
  }
  return bytes;
}

namespace {

constexpr char32_t kMetaspace = 0x2581;  // what stands for a space in SentencePiece's vocabularies
constexpr std::string_view kMetaspaceText = "\xE2\x96\x81";
constexpr std::size_t kFewSymbols = 32;

std::uint64_t mixed(std::uint64_t x) {
  x ^= x >> 32;
  x *= 0x9E3779B97F4A7C15u;
  return x ^ x >> 29;
}

std::uint64_t hash_of(std::string_view bytes) {
  std::uint64_t hash = bytes.size();
  std::size_t i = 0;
  for (std::uint64_t eight; i + 8 <= bytes.size(); i += 8) {
    std::memcpy(&eight, bytes.data() + i, 8);
    hash = (std::rotl(hash, 23) ^ eight) * 0x9E3779B97F4A7C15u;
  }
  std::uint64_t rest = 0;
  for (; i < bytes.size(); ++i) rest = rest << 8 | static_cast<unsigned char>(bytes[i]);
  hash = (std::rotl(hash, 23) ^ rest) * 0x9E3779B97F4A7C15u;
  return (hash ^ hash >> 32) * 0x9E3779B97F4A7C15u;
}

std::string byte_token(unsigned byte) {
  constexpr const char* kDigits = "0123456789ABCDEF";
  return {'<', '0', 'x', kDigits[byte >> 4], kDigits[byte & 15], '>'};
}

}  // namespace

Bpe::Bpe(const JsonSection& section, bool byte_level) : byte_level_(byte_level) {
  if (section.find("type") && section.type() != "BPE") section.refuse_type("BPE");
  section.allow({"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                 "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (const auto* dropout = section.find("dropout"))
    MOESH_CHECK(dropout->as_number(section.name_of("dropout")) == 0, ErrorKind::data,
                section.name(), ".dropout makes ids random; set it to null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    MOESH_CHECK(section.text_or(key, "").empty(), ErrorKind::data, section.name(), ".", key, " is ",
                formats::shown(section.text_or(key, "")), ", which moesh does not know");
  fuse_unknown_ = section.flag("fuse_unk", false);
  byte_fallback_ = section.flag("byte_fallback", false);
  ignore_merges_ = section.flag("ignore_merges", false);
  read_vocabulary(section);
  MOESH_CHECK(
      !byte_level_ || !byte_fallback_ || std::find(bytes_, bytes_ + 256, kNoToken) == bytes_ + 256,
      ErrorKind::data, section.name(),
      ": byte_fallback with ByteLevel and no token for some bytes, which moesh does not know");
  read_merges(section);
  if (section.find("unk_token")) {
    has_unknown_ = true;
    const auto found = vocabulary_.find(section.text("unk_token"));
    MOESH_CHECK(found != vocabulary_.end(), ErrorKind::data, section.name(), ".unk_token is ",
                formats::shown(section.text("unk_token")), ", which is not in the vocabulary");
    unknown_ = found->second;
  }
  find_word_starts();
}

void Bpe::read_vocabulary(const JsonSection& section) {
  const std::string name = section.name_of("vocab");
  const auto& entries = section.at("vocab").as_object(name);
  vocabulary_.reserve(entries.size());
  std::vector<std::int64_t> ids;
  for (const auto& [token, value] : entries) {
    const std::int64_t id = value.as_int(name);
    MOESH_CHECK(id >= 0 && id < std::numeric_limits<TokenId>::max(), ErrorKind::data, name, ": ",
                formats::shown(token), " has the id ", id);
    vocabulary_.emplace(token, static_cast<TokenId>(id));
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  MOESH_CHECK(twice == ids.end(), ErrorKind::data, name, ": two tokens have the id ", *twice);

  word_texts_.reserve(vocabulary_.size());  // so that none moves
  words_.reserve(vocabulary_.size());
  for (const auto& [token, id] : vocabulary_) {
    std::optional<std::string> text = byte_level_ ? bytes_of_letters(token) : token;
    if (!text || text->empty()) continue;  // no word can be this one
    words_.emplace(word_texts_.emplace_back(std::move(*text)), id);
    if (const auto characters = code_points(token); characters.size() == 1)
      characters_.emplace(characters[0], id);
  }
  for (unsigned b = 0; b < 256; ++b) {
    std::string token;
    if (byte_level_)
      append_utf8(token, letter_of_byte(static_cast<unsigned char>(b)));
    else
      token = byte_token(b);
    const auto found = vocabulary_.find(token);
    bytes_[b] = found == vocabulary_.end() ? kNoToken : found->second;
  }
}

void Bpe::read_merges(const JsonSection& section) {
  const std::string name = section.name_of("merges");
  const auto& list = section.at("merges").as_list(name);
  merges_.resize(std::bit_ceil(list.size() * 2 + 1));
  std::uint32_t rank = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string where = detail::concat(name, "[", i, "]");
    if (const auto* pair = std::get_if<formats::JsonList>(&list[i].value)) {
      MOESH_CHECK(pair->size() == 2, ErrorKind::data, where, " has ", pair->size(),
                  " texts; a merge has two");
      add_merge((*pair)[0].as_text(where), (*pair)[1].as_text(where), rank++, where);
      continue;
    }
    const std::string& line = list[i].as_text(where);
    if (line.starts_with("#version")) continue;
    const std::size_t space = line.find(' ');
    MOESH_CHECK(space != std::string::npos && line.find(' ', space + 1) == std::string::npos,
                ErrorKind::data, where, " is ", formats::shown(line),
                "; a merge is two texts with one space between them");
    add_merge(line.substr(0, space), line.substr(space + 1), rank++, where);
  }
}

void Bpe::add_merge(const std::string& left, const std::string& right, std::uint32_t rank,
                    const std::string& where) {
  const auto id_of = [&](const std::string& token) {
    const auto found = vocabulary_.find(token);
    MOESH_CHECK(found != vocabulary_.end(), ErrorKind::data, where, ": ", formats::shown(token),
                " is not in the vocabulary");
    return found->second;
  };
  const BpeMerge merge{std::uint64_t(id_of(left)) << 32 | static_cast<std::uint64_t>(id_of(right)),
                       rank, id_of(left + right)};
  std::size_t slot = mixed(merge.pair) & (merges_.size() - 1);
  while (merges_[slot].pair != kNoPair && merges_[slot].pair != merge.pair)
    slot = (slot + 1) & (merges_.size() - 1);
  merges_[slot] = merge;  // of two equal ones the later counts, as in the package
}

const Bpe::BpeMerge* Bpe::find_merge(TokenId left, TokenId right) const {
  const std::uint64_t pair =
      static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint32_t>(right);
  std::size_t slot = mixed(pair) & (merges_.size() - 1);
  while (merges_[slot].pair != pair) {
    if (merges_[slot].pair == kNoPair) return nullptr;
    slot = (slot + 1) & (merges_.size() - 1);
  }
  return &merges_[slot];
}

// Where no token has a "\u2581" behind anything else, no merge crosses the beginning of a word:
// then a text that nothing has split may be split there, and its words come from the cache. (An
// unknown character would also depend on what is before it.)
void Bpe::find_word_starts() {
  const bool nothing_unknown =
      byte_fallback_ && std::find(bytes_, bytes_ + 256, kNoToken) == bytes_ + 256;
  starts_words_ =
      !byte_level_ && !ignore_merges_ && nothing_unknown && characters_.count(kMetaspace);
  for (const auto& [token, id] : vocabulary_) {
    std::string_view rest = token;
    while (rest.starts_with(kMetaspaceText)) rest.remove_prefix(kMetaspaceText.size());
    if (rest.find(kMetaspaceText) != std::string_view::npos) starts_words_ = false;
  }
}

void Bpe::encode(std::string_view word, WordCache& cache, std::vector<TokenId>& ids,
                 Widths* widths) const {
  if (!starts_words_) return encode_part(word, cache, ids, widths);
  while (!word.empty()) {
    std::size_t end = 0;
    while (word.substr(end).starts_with(kMetaspaceText)) end += kMetaspaceText.size();
    end = std::min(word.find(kMetaspaceText, end), word.size());
    encode_part(word.substr(0, end), cache, ids, widths);
    word.remove_prefix(end);
  }
}

void Bpe::encode_part(std::string_view word, WordCache& cache, std::vector<TokenId>& ids,
                      Widths* widths) const {
  using CachedWord = WordCache::CachedWord;
  if (widths || word.size() > CachedWord::kMaxBytes) return merge_word(word, cache, ids, widths);
  CachedWord& entry = cache.of(hash_of(word));
  if (entry.num_bytes == word.size() && std::memcmp(entry.bytes, word.data(), word.size()) == 0) {
    ids.insert(ids.end(), entry.ids, entry.ids + entry.num_ids);
    return;
  }
  const std::size_t before = ids.size();
  merge_word(word, cache, ids, nullptr);
  const std::size_t num_ids = ids.size() - before;
  if (num_ids > CachedWord::kMaxIds) return;
  entry.num_bytes = static_cast<std::uint8_t>(word.size());
  entry.num_ids = static_cast<std::uint8_t>(num_ids);
  std::memcpy(entry.bytes, word.data(), word.size());
  std::copy(ids.begin() + static_cast<std::ptrdiff_t>(before), ids.end(), entry.ids);
}

void Bpe::merge_word(std::string_view word, WordCache& cache, std::vector<TokenId>& ids,
                     Widths* widths) const {
  if (ignore_merges_)
    if (const auto found = words_.find(word); found != words_.end()) {
      if (widths) widths->push_back(word.size());
      return ids.push_back(found->second);
    }
  std::vector<TokenId>& symbols = cache.symbols;
  symbols.clear();
  Widths of_word;
  Widths* const kept = widths ? &of_word : nullptr;
  symbols_of(word, symbols, kept);
  if (symbols.size() <= kFewSymbols)
    merge_few(symbols, kept);
  else
    merge_many(symbols, kept);
  ids.insert(ids.end(), symbols.begin(), symbols.end());
  if (widths) widths->insert(widths->end(), of_word.begin(), of_word.end());
}

// Bytes of a fallback go before an unknown token that is still open: so the package does it.
void Bpe::symbols_of(std::string_view word, std::vector<TokenId>& symbols, Widths* widths) const {
  const auto put = [&](TokenId id, std::size_t width) {
    symbols.push_back(id);
    if (widths) widths->push_back(width);
  };
  std::size_t open = 0;  // bytes of an unknown token that others may join
  const auto close = [&] {
    if (open > 0) put(unknown_, std::exchange(open, 0));
  };
  const auto add_unknown = [&](std::string_view character) {
    if (byte_fallback_ && !byte_level_) {
      const auto id_of = [&](char byte) { return bytes_[static_cast<unsigned char>(byte)]; };
      if (std::none_of(character.begin(), character.end(),
                       [&](char byte) { return id_of(byte) == kNoToken; })) {
        for (const char byte : character) put(id_of(byte), 1);
        return;
      }
    }
    if (!has_unknown_) return;  // dropped
    if (!fuse_unknown_) close();
    open += character.size();
  };
  if (byte_level_) {
    for (const char byte : word) {
      const TokenId id = bytes_[static_cast<unsigned char>(byte)];
      if (id == kNoToken) {
        add_unknown({&byte, 1});
        continue;
      }
      close();
      put(id, 1);
    }
  } else {
    for (const char *at = word.data(), *end = at + word.size(); at < end;) {
      const char* const begin = at;
      const auto found = characters_.find(next_code_point(at));
      if (found == characters_.end()) {
        add_unknown({begin, at});
        continue;
      }
      close();
      put(found->second, static_cast<std::size_t>(at - begin));
    }
  }
  close();
}

void Bpe::merge_few(std::vector<TokenId>& symbols, Widths* widths) const {
  const BpeMerge* merges[kFewSymbols];
  std::size_t n = symbols.size();
  for (std::size_t i = 0; i + 1 < n; ++i) merges[i] = find_merge(symbols[i], symbols[i + 1]);
  while (n > 1) {
    std::size_t best = n;
    std::uint32_t rank = std::numeric_limits<std::uint32_t>::max();
    for (std::size_t i = 0; i + 1 < n; ++i)
      if (merges[i] && merges[i]->rank < rank) best = i, rank = merges[i]->rank;
    if (best == n) break;
    symbols[best] = merges[best]->merged;
    if (widths) {
      (*widths)[best] += (*widths)[best + 1];
      widths->erase(widths->begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    for (std::size_t i = best + 1; i + 1 < n; ++i) symbols[i] = symbols[i + 1];
    for (std::size_t i = best + 1; i + 2 < n; ++i) merges[i] = merges[i + 1];
    --n;
    if (best > 0) merges[best - 1] = find_merge(symbols[best - 1], symbols[best]);
    if (best + 1 < n) merges[best] = find_merge(symbols[best], symbols[best + 1]);
  }
  symbols.resize(n);
}

struct Bpe::Symbol {
  TokenId id;
  std::int32_t previous, next;  // -1: none
  bool is_gone = false;
};

// With a queue of pairs: a word may be a whole document.
void Bpe::merge_many(std::vector<TokenId>& symbols, Widths* widths) const {
  using Candidate = std::tuple<std::uint32_t, std::int32_t, TokenId>;  // rank, place, merged
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
  MOESH_CHECK(symbols.size() < std::numeric_limits<std::int32_t>::max(), ErrorKind::data,
              "a word of ", symbols.size(), " characters");
  std::vector<Symbol> chain;
  const auto num = static_cast<std::int32_t>(symbols.size());
  const auto at = [&](std::int32_t i) -> Symbol& { return chain[static_cast<std::size_t>(i)]; };
  for (std::int32_t i = 0; i < num; ++i)
    chain.push_back({symbols[static_cast<std::size_t>(i)], i - 1, i + 1 < num ? i + 1 : -1});
  const auto propose = [&](std::int32_t left) {
    if (left < 0 || at(left).next < 0) return;
    if (const BpeMerge* merge = find_merge(at(left).id, at(at(left).next).id))
      queue.push({merge->rank, left, merge->merged});
  };
  for (std::int32_t i = 0; i < num; ++i) propose(i);
  while (!queue.empty()) {
    const auto [rank, place, merged] = queue.top();
    queue.pop();
    Symbol& left = at(place);
    if (left.is_gone || left.next < 0) continue;
    Symbol& right = at(left.next);
    const BpeMerge* merge = find_merge(left.id, right.id);
    if (!merge || merge->merged != merged) continue;  // the pair is not there any more
    left.id = merged;
    if (widths)
      (*widths)[static_cast<std::size_t>(place)] +=
          std::exchange((*widths)[static_cast<std::size_t>(left.next)], 0);
    left.next = right.next;
    right.is_gone = true;
    if (right.next >= 0) at(right.next).previous = place;
    propose(left.previous);
    propose(place);
  }
  if (widths) std::erase(*widths, 0);
  symbols.clear();
  for (const Symbol& symbol : chain)
    if (!symbol.is_gone) symbols.push_back(symbol.id);
}

}  // namespace moesh::tokenizer
