#pragma once
// Texts as token ids and back, as a tokenizer.json says it: id for id what the Python package
// `tokenizers` gives. No LibTorch here.

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/tokenizer/added_tokens.h"
#include "moesh/tokenizer/bpe.h"
#include "moesh/tokenizer/decoder.h"
#include "moesh/tokenizer/normalizer.h"
#include "moesh/tokenizer/pre_tokenizer.h"

namespace moesh::tokenizer {

/// The tokenizer.json of a tokenizer that is named by its file or by its folder.
std::filesystem::path file_of(const std::filesystem::path& file_or_folder);

/// Buffers of a thread that encodes, reused from text to text. One for each thread and tokenizer.
struct EncodeBuffers {
  WordCache cache;
  WordBuffers words;
  std::string normalized[2];
  std::vector<TextPiece> pieces, normalized_pieces;
  Origins origins;     // of the normalised text
  Bpe::Widths widths;  // of the tokens of a word
};

/// Threads may encode with one at the same time.
class Tokenizer {
 public:
  /// A tokenizer.json; `name` is what errors (data) call it.
  Tokenizer(std::string_view json, const std::string& name);
  /// From a file, or from the tokenizer.json of a folder.
  static Tokenizer read(const std::filesystem::path& file_or_folder);

  /// Appends the ids of a text, which must be UTF-8 (Error, data). `with_template`: also the tokens
  /// that the post-processor puts around a text. `spans`: also the bytes of the text that each
  /// token stands for, whole characters; none for a token of the template.
  void encode(std::string_view text, bool with_template, EncodeBuffers& buffers,
              std::vector<TokenId>& ids, std::vector<ByteRange>* spans = nullptr) const;
  std::vector<TokenId> encode(std::string_view text, bool with_template = true) const;
  /// Ids that no token has are left out.
  std::string decode(std::span<const TokenId> ids, bool skip_special = false) const;

  /// One more than the largest id.
  std::int64_t vocab_size() const { return static_cast<std::int64_t>(tokens_.size()); }
  std::optional<TokenId> find(const std::string& token) const;
  /// Whether the token of an id is a mark, such as the end of a turn, and not text.
  bool is_special(TokenId id) const { return is_special_.at(static_cast<std::size_t>(id)); }
  /// The decoded text of an id; empty if it has none.
  const std::string& token(TokenId id) const { return tokens_.at(static_cast<std::size_t>(id)); }

 private:
  Tokenizer(const formats::JsonValue& root, const std::string& name);
  explicit Tokenizer(const JsonSection& file);
  void read_tokens(const JsonSection& file);
  void read_template(const JsonSection& section);
  void encode_text(std::string_view text, bool at_start, EncodeBuffers& buffers,
                   std::vector<TokenId>& ids, std::vector<ByteRange>* spans) const;

  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  Bpe model_;
  AddedTokens added_;
  TokenDecoder decoder_;
  std::vector<TokenId> before_, behind_;  // the template of a single text
  std::vector<std::string> tokens_;       // by id, as decoders take them
  std::vector<bool> is_token_, is_special_;
};

}  // namespace moesh::tokenizer
