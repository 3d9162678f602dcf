#pragma once
// Texts as a file of token ids, once, before training: PREFIX.bin and PREFIX.idx in Megatron's
// format, PREFIX.mask where they are chats, and PREFIX.moesh.json with what was read and a checksum
// of every 4 MiB.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "moesh/data/chats.h"
#include "moesh/formats/token_file.h"

namespace moesh::data {

struct TokenizeOptions {
  std::string tokenizer;  // a tokenizer.json, or its folder
  std::string out;        // PREFIX
  /// Files, folders, globs; "-": standard input.
  std::vector<std::string> inputs;
  std::string format = "auto";  // by the name of a file; or text, jsonl
  std::string field = "text";   // of an object of JSONL
  std::string end_of_document;  // a token that closes every document; empty: none
  bool with_template = false;   // also the tokens that the tokenizer puts around a text
  ChatOptions chats = {};
  bool skip_errors = false;    // leave out a line that cannot be read, instead of stopping
  int num_threads = 0;         // 0: one for each core
  double save_interval = 30;   // seconds of work that may be lost
  bool show_progress = false;  // a bar on standard error, or a line if that is not a terminal

  void validate() const;
};

struct TokenizeSummary : TokenCounts {
  bool has_mask = false;  // they are chats
  std::int64_t num_files = 0, num_bytes = 0;
  std::int64_t went_on_from = 0;  // documents that an earlier run had written
  double seconds = 0;
  const char* id_type = "";
};

/// Goes on where an earlier run with the same options and inputs stopped. What is there under the
/// name PREFIX is never overwritten.
TokenizeSummary tokenize(const TokenizeOptions& options);

/// Compares every byte of the files of PREFIX with its checksum; throws Error (data).
void check_token_files(const std::string& prefix);

/// The end-of-document token of a tokenizer's folder: eos_token of tokenizer_config.json; empty
/// if there is none.
std::string find_end_of_document(const std::string& tokenizer);

// Text files as token ids, made when a run first asks for them and kept in a folder: memory does
// not grow with the text, and the next run finds them.

struct TokenizedText {
  std::string path, kind;   // text: one document; jsonl: one for each line
  std::string tokenizer;    // a tokenizer.json, or its folder
  std::string folder;       // where ids are kept
  std::int64_t vocab_size;  // of the model
};

/// The ids of the text, each document closed by the tokenizer's own end-of-text token where its
/// folder names one. A run that was stopped while it made them goes on there; where several
/// processes ask, one makes them and the others wait. Another text or tokenizer has another name.
formats::TokenFile open_tokenized(const TokenizedText& text);

// A document of a file of tokens as text, so that a person can look at what a model is trained on.

struct ShowOptions {
  std::string path;  // PREFIX, PREFIX.bin or PREFIX.idx
  std::int64_t document = 0;
  std::string tokenizer;  // a tokenizer.json, or its folder; empty: that of PREFIX.moesh.json
  /// Marks around tokens that are trained on, if there is a mask.
  std::string begin_trained = "[[", end_trained = "]]";
};

/// The contents of the file in a few lines, followed by the document.
std::string show_document(const ShowOptions& options);

}  // namespace moesh::data
