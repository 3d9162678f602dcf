#pragma once
// A document of a file of tokens as text, so that a person can look at what a model is trained on.

#include <cstdint>
#include <string>

namespace moesh::data {

struct ShowOptions {
  std::string path;  // PREFIX, PREFIX.bin or PREFIX.idx
  std::int64_t document = 0;
  std::string tokenizer;  // a tokenizer.json, or its folder; empty: that of PREFIX.moesh.json
  /// What is put around tokens that are trained on, where there is a mask.
  std::string begin_trained = "[[", end_trained = "]]";
};

/// What the file holds, in a few lines, and the document behind them.
std::string show_document(const ShowOptions& options);

}  // namespace moesh::data
