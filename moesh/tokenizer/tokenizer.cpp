#include "moesh/tokenizer/tokenizer.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"

namespace moesh::tokenizer {
namespace {

constexpr std::uint64_t kMaxFileBytes = 200'000'000;
// A vocabulary with an id far behind the others would take as much memory as that id is large.
constexpr TokenId kMaxTokens = 10'000'000;

template <class T>
T read_part(const JsonSection& file, const char* key) {
  const auto* value = file.find(key);
  return value ? T(JsonSection(*value, file.name_of(key))) : T();
}

AddedTokens read_added(const JsonSection& file, const Bpe& model, const Normalizer& normalizer) {
  if (!file.find("added_tokens")) return {};
  return AddedTokens(file.list("added_tokens"), model, normalizer);
}

}  // namespace

Tokenizer::Tokenizer(std::string_view json, const std::string& name)
    : Tokenizer(formats::parse_json(json, name, {.max_bytes = kMaxFileBytes}), name) {}

Tokenizer::Tokenizer(const formats::JsonValue& root, const std::string& name)
    : Tokenizer(JsonSection(root, name + ": ")) {}

Tokenizer::Tokenizer(const JsonSection& file)
    : normalizer_(read_part<Normalizer>(file, "normalizer")),
      pre_tokenizer_(read_part<PreTokenizer>(file, "pre_tokenizer")),
      model_(JsonSection(file.at("model"), file.name_of("model")), pre_tokenizer_.is_byte_level()),
      added_(read_added(file, model_, normalizer_)),
      decoder_(read_part<TokenDecoder>(file, "decoder")) {
  file.allow({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
              "post_processor", "decoder", "model"});
  MOESH_CHECK(file.text_or("version", "1.0") == "1.0", ErrorKind::data, file.name_of("version"),
              " is ", formats::shown(file.text("version")), "; moesh knows 1.0");
  for (const char* key : {"truncation", "padding"})
    MOESH_CHECK(!file.find(key), ErrorKind::data, file.name_of(key),
                " is set, and would change documents; set it to null");
  read_tokens(file);
  if (const auto* value = file.find("post_processor"))
    read_template(JsonSection(*value, file.name_of("post_processor")));
}

void Tokenizer::read_tokens(const JsonSection& file) {
  TokenId last = -1;
  for (const auto& [token, id] : model_.vocabulary()) last = std::max(last, id);
  for (const AddedToken& token : added_.all()) last = std::max(last, token.id);
  MOESH_CHECK(last < kMaxTokens, ErrorKind::data, file.name(), "a token has the id ", last,
              "; moesh takes ids below ", kMaxTokens);
  const auto num = static_cast<std::size_t>(last + 1);
  tokens_.resize(num);
  is_token_.resize(num);
  is_special_.resize(num);
  const auto set = [&](TokenId id, const std::string& text) {
    tokens_[static_cast<std::size_t>(id)] = text;
    is_token_[static_cast<std::size_t>(id)] = true;
  };
  for (const auto& [token, id] : model_.vocabulary()) set(id, token);
  for (const AddedToken& token : added_.all()) {
    set(token.id, token.pattern);
    // The package asks whether the text that it decodes is that of a special token.
    is_special_[static_cast<std::size_t>(token.id)] =
        token.special && token.pattern == token.content;
  }
}

std::filesystem::path file_of(const std::filesystem::path& file_or_folder) {
  formats::refuse_hub_name(file_or_folder.string());
  return formats::is_folder(file_or_folder) ? file_or_folder / "tokenizer.json" : file_or_folder;
}

Tokenizer Tokenizer::read(const std::filesystem::path& file_or_folder) {
  const std::filesystem::path path = file_of(file_or_folder);
  const std::string json = formats::read_file(path.string(), ErrorKind::data, kMaxFileBytes);
  return Tokenizer(json, path.string());
}

void Tokenizer::read_template(const JsonSection& section) {
  const std::string& type = section.type();
  if (type == "ByteLevel") {
    section.allow({"add_prefix_space", "trim_offsets", "use_regex"});  // only offsets
    return;
  }
  if (type == "Sequence") {
    section.allow({"processors"});
    for (const JsonSection& one : section.list("processors")) read_template(one);
    return;
  }
  if (type != "TemplateProcessing")
    section.refuse_type("TemplateProcessing, ByteLevel and Sequence");
  section.allow({"single", "pair", "special_tokens"});
  std::vector<TokenId> before, behind;
  bool has_text = false;
  const JsonSection specials(section.at("special_tokens"), section.name_of("special_tokens"));
  for (const JsonSection& item : section.list("single")) {
    item.allow({"Sequence", "SpecialToken"});
    if (item.find("Sequence")) {
      const JsonSection sequence(item.at("Sequence"), item.name_of("Sequence"));
      sequence.allow({"id", "type_id"});
      MOESH_CHECK(sequence.text("id") == "A" && !has_text, ErrorKind::data, sequence.name(),
                  " is not the only text of the template");
      has_text = true;
      continue;
    }
    const JsonSection special(item.at("SpecialToken"), item.name_of("SpecialToken"));
    special.allow({"id", "type_id"});
    const std::string& id = special.text("id");
    const JsonSection entry(specials.at(id), specials.name_of(id));
    for (const auto& value : entry.at("ids").as_list(entry.name_of("ids"))) {
      const std::int64_t token = value.as_int(entry.name_of("ids"));
      MOESH_CHECK(token >= 0 && token < vocab_size() && is_token_[static_cast<std::size_t>(token)],
                  ErrorKind::data, entry.name_of("ids"), " has ", token,
                  ", which is not the id of a token");
      (has_text ? behind : before).push_back(static_cast<TokenId>(token));
    }
  }
  MOESH_CHECK(has_text, ErrorKind::data, section.name_of("single"), " has no place for the text");
  before_.insert(before_.begin(), before.begin(), before.end());  // around what is there already
  behind_.insert(behind_.end(), behind.begin(), behind.end());
}

void Tokenizer::encode(std::string_view text, bool with_template, EncodeBuffers& buffers,
                       std::vector<TokenId>& ids, std::vector<ByteRange>* spans) const {
  const std::size_t bad = find_bad_utf8(text);
  MOESH_CHECK(bad == std::string_view::npos, ErrorKind::data, "byte ", bad,
              " of the text is not UTF-8");
  const auto add_template = [&](const std::vector<TokenId>& tokens, std::size_t place) {
    if (!with_template) return;
    ids.insert(ids.end(), tokens.begin(), tokens.end());
    if (spans) spans->insert(spans->end(), tokens.size(), {place, place});
  };
  add_template(before_, 0);
  buffers.pieces.clear();
  added_.split(text, /*normalized=*/false, buffers.pieces);
  for (const TextPiece& piece : buffers.pieces) {
    const std::size_t first = spans ? spans->size() : 0;
    if (piece.id != kNoToken) {
      ids.push_back(piece.id);
      if (spans) spans->push_back({0, piece.text.size()});
    } else {
      encode_text(piece.text, piece.text.data() == text.data(), buffers, ids, spans);
    }
    if (!spans) continue;
    const auto place = static_cast<std::size_t>(piece.text.data() - text.data());
    for (std::size_t i = first; i < spans->size(); ++i) {
      auto& [begin, end] = (*spans)[i];
      begin += place, end += place;
      while (begin > 0 && is_continuation(text[begin])) --begin;
      while (end < text.size() && is_continuation(text[end])) ++end;
    }
  }
  add_template(behind_, text.size());
}

// A text without added tokens, but for those that are found in normalised text. Spans are of it.
void Tokenizer::encode_text(std::string_view text, bool at_start, EncodeBuffers& buffers,
                            std::vector<TokenId>& ids, std::vector<ByteRange>* spans) const {
  const std::string_view normalized =
      normalizer_.apply(text, buffers.normalized, spans ? &buffers.origins : nullptr);
  buffers.words.keeps_origins = spans != nullptr;
  buffers.normalized_pieces.clear();
  added_.split(normalized, /*normalized=*/true, buffers.normalized_pieces);
  for (const TextPiece& piece : buffers.normalized_pieces) {
    const auto place = static_cast<std::size_t>(piece.text.data() - normalized.data());
    const auto add_span = [&](ByteRange of_piece) {
      spans->push_back(origin_of(buffers.origins, {place + of_piece.begin, place + of_piece.end}));
    };
    if (piece.id != kNoToken) {
      ids.push_back(piece.id);
      if (spans) add_span({0, piece.text.size()});
      continue;
    }
    pre_tokenizer_.split(piece.text, at_start && place == 0, buffers.words);
    for (const Word& word : buffers.words.words) {
      buffers.widths.clear();
      model_.encode(word.text, buffers.cache, ids, spans ? &buffers.widths : nullptr);
      std::size_t done = 0;
      for (const std::size_t width : buffers.widths) {
        add_span(buffers.words.origin(word, {done, done + width}));
        done += width;
      }
    }
  }
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, bool with_template) const {
  EncodeBuffers buffers;
  std::vector<TokenId> ids;
  encode(text, with_template, buffers, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
  std::vector<std::string> tokens;
  for (const TokenId id : ids) {
    const auto i = static_cast<std::size_t>(id);
    if (id < 0 || i >= tokens_.size() || !is_token_[i]) continue;
    if (!skip_special || !is_special_[i]) tokens.push_back(tokens_[i]);
  }
  return decoder_.decode(std::move(tokens));
}

std::optional<TokenId> Tokenizer::find(const std::string& token) const {
  for (const AddedToken& added : added_.all())
    if (added.content == token) return added.id;
  const auto found = model_.vocabulary().find(token);
  return found == model_.vocabulary().end() ? std::nullopt : std::optional(found->second);
}

}  // namespace moesh::tokenizer
