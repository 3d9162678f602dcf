#include "moesh/tokenizer/pattern.h"

#include <gtest/gtest.h>

#include "moesh/base/error.h"
#include "moesh/base/text.h"

namespace moesh::tokenizer {
namespace {

using Texts = std::vector<std::string>;

// Every match, one after the other.
Texts matches(const std::string& regex, const std::string& text) {
  const SplitPattern pattern(regex, "test");
  Matches found(pattern, text);
  Texts all;
  std::size_t from = 0;
  while (const auto match = found.next(from)) {
    all.push_back(text.substr(match->begin, match->end - match->begin));
    from = match->end;
  }
  return all;
}

TEST(SplitPattern, TakesAlternativesInOrderAndGoesBack) {
  EXPECT_EQ(matches("a|ab", "ab"), (Texts{"a"}));
  EXPECT_EQ(matches("ab|a", "abac"), (Texts{"ab", "a"}));
  EXPECT_EQ(matches("a*ab", "aaab b"), (Texts{"aaab"}));
  EXPECT_EQ(matches("a+?b?", "aab"), (Texts{"a", "ab"}));
  EXPECT_EQ(matches("(?:ab|a)+c", "ababac"), (Texts{"ababac"}));
  EXPECT_EQ(matches("x{2,3}", "xxxxxx x"), (Texts{"xxx", "xxx"}));
  EXPECT_EQ(matches("x{2}", "xxxxx"), (Texts{"xx", "xx"}));
  EXPECT_EQ(matches("(a|b){2}c", "abc bbc"), (Texts{"abc", "bbc"}));
  EXPECT_EQ(matches("[^b]", "abé"), (Texts{"a", "é"}));
  EXPECT_EQ(matches("a.", "ab a\n a\r"), (Texts{"ab", "a\r"}));
  EXPECT_EQ(matches("^a|b$", "aa\nab\nb"), (Texts{"a", "a", "b", "b"}));
}

TEST(SplitPattern, KeepsWhatAPossessiveOneHas) {
  EXPECT_EQ(matches("a++a|b", "aab"), (Texts{"b"}));
  EXPECT_EQ(matches("[ab]?+a|c", "ac"), (Texts{"c"}));
}

TEST(SplitPattern, ReadsRubysSyntax) {
  // {1,3}+ is a repetition of a repetition there, and possessive elsewhere.
  EXPECT_EQ(matches("\\d{1,3}+", "12345"), (Texts{"12345"}));
  EXPECT_EQ(matches("\\d{1,3}+5", "12345"), (Texts{"12345"}));
  EXPECT_EQ(matches("\\s+", "a\xE1\xA0\x8E\xC2\xA0z"), (Texts{"\xC2\xA0"}));  // not U+180E
  EXPECT_EQ(matches("\\p{L}+", "aé字\xF0\x9D\x94\xB8!"), (Texts{"aé字\xF0\x9D\x94\xB8"}));
  EXPECT_EQ(matches("\\p{^L}|[\\P{L}]", "a1b"), (Texts{"1"}));
  EXPECT_EQ(matches("[\\x41-\\x43\\u0044\\x{1F600}]+", "xABCD\xF0\x9F\x98\x80y"),
            (Texts{"ABCD\xF0\x9F\x98\x80"}));
  EXPECT_EQ(matches("[a\\-z]+", "a-bz"), (Texts{"a-", "z"}));
  EXPECT_EQ(matches("[+-]", "a+-"), (Texts{"+", "-"}));
}

TEST(SplitPattern, FindsTheOtherCaseOnlyWhereItIsAskedFor) {
  EXPECT_EQ(matches("(?i:'s|'re)|s", "'S 'rE s S"), (Texts{"'S", "'rE", "s"}));
  EXPECT_EQ(matches("(?i:'s)", "'\xC5\xBF"), (Texts{"'\xC5\xBF"}));  // the long s
  EXPECT_EQ(matches("(?i:[sdmt])x", "Dx \xE2\x84\xAAx"), (Texts{"Dx"}));
}

TEST(SplitPattern, LooksAheadWithinTheText) {
  EXPECT_EQ(matches("\\s+(?!\\S)|\\s+", "a   b  "), (Texts{"  ", " ", "  "}));
  EXPECT_EQ(matches("a(?=bc)", "ab abc"), (Texts{"a"}));
}

TEST(SplitPattern, NamesWhatItDoesNotKnow) {
  for (const auto& [regex, reason] :
       std::vector<std::pair<std::string, std::string>>{{"(?<=a)b", "'(?<'"},
                                                        {"(?>a)", "'(?>'"},
                                                        {"\\bx", "'\\b'"},
                                                        {"\\1x", "'\\1'"},
                                                        {"\\p{Han}", "\"Han\""},
                                                        {"[a&&b]", "'&&'"},
                                                        {"[a[b]]", "'['"},
                                                        {"[b-a]", "a range without order"},
                                                        {"a**", "a repetition of a repetition"},
                                                        {"a{2}?", "'?' after '{n}'"},
                                                        {"(a*)+b", "may be empty"},
                                                        {"(?:ab)++", "a possessive repetition"},
                                                        {"a{x}", "'{'"},
                                                        {"*a", "a repetition of nothing"},
                                                        {"(a", "no end of a group"},
                                                        {"a)", "')' without '('"},
                                                        {"[a", "no end of a set"},
                                                        {"(?i:ss)", "fold into one"},
                                                        {"(?i:é)", "not ASCII"},
                                                        {"a*", "may match nothing"},
                                                        {"a{5,2}", "an interval"},
                                                        {std::string(60, '('), "nested deeper"}})
    try {
      const SplitPattern pattern(regex, "tokenizer.json");
      ADD_FAILURE() << regex << " was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::data);
      EXPECT_NE(std::string(e.what()).find(reason), std::string::npos) << e.what();
      EXPECT_TRUE(std::string(e.what()).starts_with("tokenizer.json")) << e.what();
    }
}

// Each of these took minutes or was refused; backtracking that starts anew at every place takes a
// hundred billion steps.
TEST(SplitPattern, TakesLinearTimeForRepetitionsThatFail) {
  const std::string many(300'000, 'a');
  for (const char* regex : {"a+b|c", "a++b|c", "a*ab|c", "a+a+b|c", "[ab]+a+c|d", "a(?=a+b)|c",
                            "a{2,}b|c", "(?:a+b)+c|d", "(?:a+)+b|c"})
    EXPECT_EQ(matches(regex, many), Texts{}) << regex;
  EXPECT_EQ(matches("a+b|a", many).size(), many.size());
  EXPECT_EQ(matches("a+b|c", many + "b"), Texts{many + "b"});
  EXPECT_EQ(matches("a+b|c", many + "cb" + many + "b"), (Texts{"c", many + "b"}));
}

// Runs that are remembered give the matches that shorter texts have, where nothing is.
TEST(SplitPattern, FindsTheSameInLongRunsAsInShortOnes) {
  for (const char* regex : {"a+b|c", "a+ab|a", "[ab]+a+c|b", "(?:a+b|ab+)c|b", "a+(?!c)|c",
                            "a*b|aa", "\\s*[b\n]+|\\s+(?!\\S)|\\s+", "(?:b+|ab)+c|ab"}) {
    for (const char* ending : {"", "b", "c", "bc", "\n", "ba", "bac", " b", "\xC3\xA9"})
      for (const char* letter : {"a", "b", " ", "\xC3\xA9"}) {
        const auto lengths = [&](int count) {
          std::string text;
          for (int i = 0; i < count; ++i) text += letter;
          text += ending;
          std::vector<std::ptrdiff_t> ends;  // from the end of the text, or of the run
          for (const std::string& match : matches(regex, text))
            ends.push_back(static_cast<std::ptrdiff_t>(match.size() / std::string(letter).size()));
          const std::size_t kept = std::min<std::size_t>(ends.size(), 4);
          return std::vector(ends.end() - static_cast<std::ptrdiff_t>(kept), ends.end());
        };
        auto few = lengths(120), many = lengths(1120);
        ASSERT_EQ(few.size(), many.size()) << regex << letter << ending;
        for (std::size_t i = 0; i < few.size(); ++i)
          EXPECT_TRUE(many[i] == few[i] || many[i] == few[i] + 1000)
              << regex << ": " << letter << "... " << ending << ": " << many[i];
      }
  }
}

TEST(SplitPattern, TakesTwelveMillionSpacesBeforeALetter) {
  const std::string spaces(12'000'000, ' ');
  const auto found = matches("\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+| ?\\p{L}+", spaces + "a");
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].size(), spaces.size() - 1);
  EXPECT_EQ(found[1], " ");
  EXPECT_EQ(found[2], "a");
}

TEST(SplitPattern, GivesUpInsteadOfRunningForHours) {
  for (const auto& [regex, length] :
       std::vector<std::pair<std::string, std::size_t>>{{"(?:a|a)+b", 64}, {"(?:aa)+b|c", 100'000}})
    try {
      matches(regex, std::string(length, 'a'));
      ADD_FAILURE() << regex << " was matched";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::data);
      for (const std::string& part : {regex, std::to_string(length) + " bytes"})
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
}

TEST(Utf8, FindsTheFirstBadByte) {
  const auto bad = [](std::string_view text) { return find_bad_utf8(text); };
  EXPECT_EQ(bad("plain text of more than eight bytes, aé字\xF0\x9F\x98\x80"), std::string::npos);
  EXPECT_EQ(bad("ab\xFF"), 2u);
  EXPECT_EQ(bad("01234567\xC3"), 8u);
  EXPECT_EQ(bad("\xC0\x80"), 0u);           // longer than needed
  EXPECT_EQ(bad("\xED\xA0\x80"), 0u);       // half of a pair
  EXPECT_EQ(bad("a\xF4\x90\x80\x80"), 1u);  // beyond the last code point
  EXPECT_EQ(with_replacements("a\xE2\x82z\xFF\xE2\x82\xAC"),
            "a\xEF\xBF\xBDz\xEF\xBF\xBD\xE2\x82\xAC");
}

}  // namespace
}  // namespace moesh::tokenizer
