#pragma once
// Canonical normalisation of Unicode.

#include <string>
#include <string_view>

#include "moesh/tokenizer/origins.h"

namespace moesh::tokenizer {

/// Composed. The result is `text` itself where nothing changes, or lies in `buffer`; then its
/// origins are appended.
std::string_view to_nfc(std::string_view text, std::string& buffer, Origins* origins = nullptr);
/// Decomposed.
std::string_view to_nfd(std::string_view text, std::string& buffer, Origins* origins = nullptr);

}  // namespace moesh::tokenizer
