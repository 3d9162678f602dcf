#pragma once
// Text files as token ids, made when a run first asks for them and kept in a folder: memory does
// not grow with the text, and the next run finds them.

#include <string>

#include "moesh/formats/token_file.h"

namespace moesh::data {

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

}  // namespace moesh::data
