#pragma once
// Canonical normalisation of Unicode.

#include <string>
#include <string_view>

namespace moesh::tokenizer {

/// Composed. The result is `text` itself where nothing changes, or lies in `buffer`.
std::string_view to_nfc(std::string_view text, std::string& buffer);
/// Decomposed.
std::string_view to_nfd(std::string_view text, std::string& buffer);

}  // namespace moesh::tokenizer
