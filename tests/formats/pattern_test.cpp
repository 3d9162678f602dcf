#include "moesh/formats/pattern.h"

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
  for (const char* text : {"(", ")", "[", "[a", "a**", "*", "a{3,2}", "\\", "(?=a)", "(a)\\1",
                           "[z-a]", "\\q", "a{1001}", "((a{100}){100}){100}"}) {
    SCOPED_TRACE(text);
    expect_parts(error_of([&] { Pattern pattern(text); }, ErrorKind::config),
                 {"is not a regular expression: "});
  }
  error_of([] { Pattern pattern(std::string(5000, '(')); }, ErrorKind::config);
}

TEST(Pattern, RefusesAGroupThatIsNotThere) {
  EXPECT_EQ(replaced("(a)", "ab", "${1}2\\1 $x${x}$"), "a2\\1 $x${x}$b");
  expect_parts(error_of([] { replaced("(a)", "ab", "x$10"); }, ErrorKind::config),
               {"\"x$10\"", "groups have one digit", "${1}0"});
  expect_parts(error_of([] { replaced("(a)", "ab", "$2"); }, ErrorKind::config),
               {"\"$2\"", "names a group that is not there"});
}

TEST(Pattern, TakesLinearTimeWhereBacktrackingTakesForEver) {
  // With backtracking this test would not end.
  for (const char* pattern : {"(a*)*b", "(a|aa)+$", "(a+)+b", "(.*)(.*)(.*)(.*)x", "(a?){30}a{30}"})
    EXPECT_EQ(replaced(pattern, std::string(200, 'a') + "-", "x").size() > 0, true) << pattern;
  EXPECT_FALSE(Pattern("(a+)+b").is_in(std::string(1'000'000, 'a')));
  // A search for each letter of a long name would be long all the same.
  EXPECT_EQ(replaced(".*b|a", std::string(10'000, 'a'), "x"), std::string(10'000, 'x'));
  expect_parts(
      error_of([] { replaced(".*b|a", std::string(10'001, 'a'), "x"); }, ErrorKind::config),
      {"10001 letters is too long", "\".*b|a\""});
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
