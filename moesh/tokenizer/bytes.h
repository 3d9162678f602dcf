#pragma once
// Bytes written as letters, as byte-level tokenizers do since GPT-2: a byte that prints stands for
// itself, and the others follow from U+0100 on.

#include <optional>
#include <string>
#include <string_view>

namespace moesh::tokenizer {

char32_t letter_of_byte(unsigned char byte);

/// The bytes that the letters stand for; nothing where one of them stands for none.
std::optional<std::string> bytes_of_letters(std::string_view text);

}  // namespace moesh::tokenizer
