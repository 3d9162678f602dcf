#pragma once
// Makes texts safe to print: they contain names that other people chose.

#include <string>
#include <string_view>

namespace moesh {

/// The text with what would control a terminal, or mislead its reader, escaped: control characters
/// and bytes that are not UTF-8 as \xNN; those of C1, marks that change the direction of text and
/// separators of lines as \uNNNN. Line ends and tabs stay.
std::string for_terminal(std::string_view text);

/// The same of a name, for one line of output: line ends and tabs are escaped too.
std::string printable(std::string_view name);

}  // namespace moesh
