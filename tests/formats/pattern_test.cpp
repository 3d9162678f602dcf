#include "moesh/formats/pattern.h"

#include <random>
#include <regex>

#include "tests/support.h"

namespace moesh::formats {
namespace {

std::string replaced(const std::string& pattern, const std::string& text, const std::string& by) {
  return Pattern(pattern).replace(text, by);
}

TEST(Pattern, ReplacesAsOneExpects) {
  EXPECT_EQ(replaced("^module\\.", "module.a.module.b", "model."), "model.a.module.b");
  EXPECT_EQ(replaced("layers\\.(\\d+)\\.(w[123])", "layers.12.w3.x", "h.$1.mlp.$2"),
            "h.12.mlp.w3.x");
  EXPECT_EQ(replaced("a|b", "cabbage", "[$&]"), "c[a][b][b][a]ge");
  EXPECT_EQ(replaced("x*", "baac", "-"), "-b-a-a-c-");
  EXPECT_EQ(replaced("\\bw\\B", "w we own", "$$"), "w $e own");
  EXPECT_EQ(replaced("a{2,3}?", "aaaaa", "<$&>"), "<aa><aa>a");
  EXPECT_EQ(replaced("(?:ab)+$", "abcabab", ""), "abc");
  EXPECT_EQ(replaced("[^a-c\\d-]", "a-1x9z", "."), "a-1.9.");
  EXPECT_EQ(replaced("(a)|(b)", "ab", "1$1 2$2;"), "1a 2;1 2b;");
}

TEST(Pattern, RefusesWhatIsNone) {
  for (const char* text : {"(", ")", "[", "[a", "a**", "*", "a{", "a{3,2}", "\\", "(?=a)", "(a)\\1",
                           "[z-a]", "\\q", "a{1000}", "((a{100}){100}){100}"}) {
    SCOPED_TRACE(text);
    expect_parts(error_of([&] { Pattern pattern(text); }, ErrorKind::config),
                 {"is not a regular expression", "at character"});
  }
  error_of([] { Pattern pattern(std::string(5000, 'a')); }, ErrorKind::config);
  error_of([] { Pattern pattern(std::string(500, '(')); }, ErrorKind::config);
}

// Against the library's own engine, on small random expressions that match no empty text (there the
// two go on in different ways).
TEST(Pattern, FindsWhatTheLibraryFinds) {
  std::mt19937 random(7);
  const auto pick = [&](std::size_t n) { return random() % n; };
  const std::vector<std::string> atoms{"a",   "b",      "[ab]", "[^a]", "\\w", ".",
                                       "\\.", "(?:ab)", "\\d",  "c",    "\\b"};
  const std::vector<std::string> repeats{"", "", "", "*", "+", "?", "{1,2}", "*?", "+?"};
  int num_compared = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::string pattern;
    const auto word = [&] {
      std::string w;
      for (std::size_t i = 0; i <= pick(3); ++i) {
        const auto& atom = atoms[pick(atoms.size())];
        w += atom + (atom == "\\b" ? "" : repeats[pick(repeats.size())]);
      }
      return w;
    };
    pattern = word();
    if (pick(3) == 0) pattern = "(" + pattern + ")" + word();
    if (pick(4) == 0) pattern += "|" + word();
    if (pick(6) == 0) pattern = "^" + pattern;
    const std::regex theirs(pattern);
    const Pattern ours(pattern);
    if (std::regex_search(std::string(), theirs) || std::regex_search(std::string("-"), theirs))
      continue;
    for (int i = 0; i < 5; ++i) {
      std::string text;
      for (std::size_t n = pick(12); n > 0; --n) text += "abc1. -"[pick(7)];
      bool has_empty = false;
      for (std::sregex_iterator m(text.begin(), text.end(), theirs), end; m != end; ++m)
        has_empty |= m->length() == 0;
      if (has_empty) continue;
      EXPECT_EQ(ours.replace(text, "<$1|$&>"), std::regex_replace(text, theirs, "<$1|$&>"))
          << pattern << " on '" << text << "'";
      ++num_compared;
    }
  }
  EXPECT_GT(num_compared, 5000);
}

TEST(Pattern, TakesLinearTimeWhereBacktrackingTakesForEver) {
  // With backtracking this test would not end.
  for (const char* pattern : {"(a*)*b", "(a|aa)+$", "(a+)+b", "(.*)(.*)(.*)(.*)x", "(a?){30}a{30}"})
    EXPECT_EQ(replaced(pattern, std::string(200, 'a') + "-", "x").size() > 0, true) << pattern;
  EXPECT_EQ(replaced("^model\\.", "model." + std::string(50'000, 'a'), "").size(), 50'000u);
  // Where it is long all the same, it ends with an error.
  expect_parts(
      error_of([] { replaced(".*b|a", std::string(50'000, 'a'), "x"); }, ErrorKind::config),
      {"takes too long", "50000 letters"});
}

TEST(Pattern, IsFoundAnywhereInAText) {
  EXPECT_TRUE(Pattern("b+").is_in("abbc"));
  EXPECT_FALSE(Pattern("^b").is_in("abbc"));
  EXPECT_TRUE(Pattern("").is_in("")) << "nothing is in everything";
  EXPECT_TRUE(Pattern("(?:x|c)$").is_in("abbc"));
  EXPECT_FALSE(Pattern("\\.gate\\.").is_in("mlp.gate_proj"));
}

}  // namespace
}  // namespace moesh::formats
