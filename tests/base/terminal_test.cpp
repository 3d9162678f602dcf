#include "moesh/base/text.h"

#include <gtest/gtest.h>

namespace moesh {
namespace {

TEST(Printable, NothingControlsTheTerminal) {
  EXPECT_EQ(printable("a\033[2Jb\r\n"), "a\\x1b[2Jb\\x0d\\x0a");
  EXPECT_EQ(printable("grün \"x\" 漢 😀"), "grün \"x\" 漢 😀");
  EXPECT_EQ(printable("a\tb\x7f"), "a\\x09b\\x7f");
  EXPECT_EQ(for_terminal("a\tb\n\x1b"), "a\tb\n\\x1b");
}

// A terminal takes U+009B, or the single byte, for the beginning of a sequence.
TEST(Printable, ControlCharactersOfC1) {
  for (unsigned code = 0x80; code < 0xa0; ++code) {
    const std::string letter{'\xc2', static_cast<char>(code)};
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
    EXPECT_EQ(printable(letter), escaped);
    EXPECT_EQ(for_terminal(letter), escaped);
  }
  EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");
  EXPECT_EQ(printable("\x9b"
                      "2J"),
            "\\x9b2J");
}

TEST(Printable, MarksThatTurnTextRound) {
  for (const char* mark : {"\u061c", "\u200e", "\u200f", "\u202a", "\u202b", "\u202c", "\u202d",
                           "\u202e", "\u2066", "\u2067", "\u2068", "\u2069", "\u2028", "\u2029"}) {
    EXPECT_EQ(for_terminal(mark).substr(0, 2), "\\u") << mark;
    EXPECT_EQ(for_terminal(mark).size(), 6u) << mark;
  }
  EXPECT_EQ(for_terminal("gpj.\u202e"
                         "exe"),
            "gpj.\\u202eexe");
  EXPECT_EQ(for_terminal("\u200d\u2065\u2027"), "\u200d\u2065\u2027");
}

TEST(Printable, BytesThatAreNotUtf8) {
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");           // an escape, written too long
  EXPECT_EQ(printable("\xe2\x80"), "\\xe2\\x80");           // cut off
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xf5\x80\x80\x80"), "\\xf5\\x80\\x80\\x80");
  EXPECT_EQ(printable("caf\xe9!"), "caf\\xe9!");
}

}  // namespace
}  // namespace moesh
