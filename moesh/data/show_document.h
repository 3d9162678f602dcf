#pragma once
// A document of a file of tokens as text, so that a person can look at what a model is trained on.

#include <cstdint>
#include <string>

namespace moesh::data {

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
