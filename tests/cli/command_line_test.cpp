#include "moesh/cli/command_line.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "moesh/cli/commands.h"
#include "tests/support.h"

namespace moesh::cli {
namespace {

const std::vector<Command>& two_commands() {
  static const std::vector<Command> all{
      {.name = "run",
       .words = "",
       .help = "runs",
       .takes_config = true,
       .options = {{"--steps", "N", "how many"}, {"--search", "[N]", "with or without"}},
       .run = nullptr},
      {.name = "compare",
       .words = "A B",
       .help = "compare two files",
       .takes_config = false,
       .options = {{"--rename", "P=R", "names", true}, {"--all", "", "everything"}},
       .run = nullptr,
       .details = "This sentence is so long that it does not fit into one line of one hundred "
                  "columns, and is broken."}};
  return all;
}

CommandLine read(const Args& args) { return read_command_line(two_commands(), args); }

std::string refusal(const Args& args) {
  return error_of([&] { read(args); }, ErrorKind::config);
}

TEST(CommandLine, TakesTheOptionsOfTheCommandAndLeavesThoseOfTheConfiguration) {
  const Args others{"--training.steps=3",
                    "--mesh",
                    "tp=2,ep=2",
                    "--model.dim",
                    "-1",
                    "--quiet",
                    "--a.b=",
                    "compare",
                    "[x,y]",
                    "-z"};
  for (const Args& steps : {Args{"--steps", "7"}, Args{"--steps=7"}})
    for (std::size_t place = 0; place <= others.size(); ++place) {
      if (place == 2 || place == 4) continue;  // between a name and its value
      Args args{"run"};
      args.insert(args.end(), others.begin(), others.end());
      args.insert(args.begin() + 1 + static_cast<std::ptrdiff_t>(place), steps.begin(),
                  steps.end());
      const CommandLine line = read(args);
      EXPECT_EQ(line.command->name, "run");
      EXPECT_EQ(line.given.number("--steps", 1), 7);
      EXPECT_EQ(line.given.rest(), others);
      EXPECT_FALSE(line.given.has("--search"));
    }
}

TEST(CommandLine, ValuesMayBeOptionalRepeatedAndOddTexts) {
  EXPECT_EQ(read({"run", "--search"}).given.text("--search"), "");
  EXPECT_EQ(read({"run", "--search", "--steps=2"}).given.text("--search"), "");
  EXPECT_EQ(read({"run", "--search", "5"}).given.text("--search"), "5");
  EXPECT_EQ(read({"run", "--search=5"}).given.text("--search"), "5");
  const Arguments given =
      read({"compare", "--rename", "a=b", "x", "--rename=c=d e,[f]", "run", "--all"}).given;
  EXPECT_EQ(given.texts("--rename"), (Args{"a=b", "c=d e,[f]"}));
  EXPECT_EQ(given.rest(), (Args{"x", "run"}));
  EXPECT_TRUE(given.has("--all"));
  given.expect_words(2);
  EXPECT_EQ(read({"compare", "--rename", "[a,b]", "-"}).given.texts("--rename"), Args{"[a,b]"});
  EXPECT_EQ(read({"compare", "-", "/x", "{}"}).given.rest(), (Args{"-", "/x", "{}"}));
  EXPECT_EQ(read({"compare", "--rename", "-x=y", "z"}).given.texts("--rename"), Args{"-x=y"});
  EXPECT_EQ(read({"compare", "--rename", "-x=y", "z"}).given.rest(), Args{"z"});
}

TEST(CommandLine, FlagsOfTheProgramStandAnywhere) {
  EXPECT_EQ(read({"--log-level", "warn", "run"}).log_level, "warn");
  EXPECT_EQ(read({"run", "--log-level=warn", "--x"}).log_level, "warn");
  EXPECT_FALSE(read({"run"}).log_level);
  for (const Args& args : {Args{"run", "--help"}, Args{"run", "-h", "--model", "x"}}) {
    EXPECT_TRUE(read(args).wants_help);
    EXPECT_EQ(read(args).command->name, "run");
  }
  EXPECT_EQ(read({"run", "--model", "x", "--help"}).given.rest(), (Args{"--model", "x"}));
  EXPECT_TRUE(read({"--help"}).wants_help);
  EXPECT_TRUE(read({"--version"}).wants_version);
  EXPECT_EQ(read({}).command, nullptr);
  EXPECT_FALSE(read({}).wants_help);
}

TEST(CommandLine, SaysWhatIsWrong) {
  expect_parts(refusal({"rum"}), {"no command 'rum'; the commands are run and compare"});
  expect_parts(refusal({"rum", "--help"}), {"no command 'rum'"});
  expect_parts(refusal({"run", "--steps"}), {"--steps needs a value, as in --steps="});
  expect_parts(refusal({"run", "--steps", "--quiet"}), {"--steps needs a value"});
  expect_parts(refusal({"run", "--steps", "-h"}), {"--steps needs a value"});
  expect_parts(refusal({"run", "--steps=", "3"}), {"--steps needs a value"});
  expect_parts(refusal({"run", "--steps=1", "--steps=2"}),
               {"run has --steps twice; keep one of them"});
  expect_parts(refusal({"run", "--log-level"}), {"--log-level needs a value"});
  expect_parts(
      refusal({"compare", "--al", "x", "y"}),
      {"compare has no option '--al'; the nearest that it has is --all; usage: moesh compare A B "
       "[OPTIONS]; moesh help compare lists its options"});
  expect_parts(refusal({"compare", "-a", "x", "y"}), {"compare has no option '-a'"});
  expect_parts(refusal({"run", "++", "x"}), {"no command"});
  expect_parts(refusal({"compare", "--all=false", "x", "y"}),
               {"--all takes no value; '--all=false' has one"});
  expect_parts(
      error_of([] { read({"run", "--steps=x"}).given.number("--steps", 1); }, ErrorKind::config),
      {"--steps is 'x'; it takes a whole number, 1 or more"});
  expect_parts(
      error_of([] { read({"run", "--steps=-2"}).given.real("--steps", 1); }, ErrorKind::config),
      {"--steps is '-2'; it takes a number, 0 or more"});
  expect_parts(error_of([] { read({"compare", "x"}).given.expect_words(2); }, ErrorKind::config),
               {"compare has 1 words where 2 are needed; usage: moesh compare A B"});
}

void expect_lines_that_fit(const std::string& text) {
  for (std::size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1)
    EXPECT_LE(text.find('\n', begin) - begin, 100u) << text.substr(begin);
}

TEST(CommandLine, EveryCommandIsDescribedInLinesThatFit) {
  for (const Command& c : commands()) {
    const std::string text = c.describe(), line = c.line();
    EXPECT_TRUE(text.starts_with("usage: moesh " + c.name)) << text;
    EXPECT_TRUE(line.starts_with("  " + c.name + " ")) << line;
    EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
    expect_lines_that_fit(text);
    expect_lines_that_fit(line);
    for (const CommandOption& o : c.options) {
      EXPECT_NE(text.find(o.name + (o.value.empty() ? "" : " " + o.value)), std::string::npos);
      EXPECT_FALSE(o.help.empty());
    }
    EXPECT_NE(c.run, nullptr);
  }
  EXPECT_EQ(two_commands()[1].describe(),
            "usage: moesh compare A B [OPTIONS]\n"
            "\n"
            "Compare two files. This sentence is so long that it does not fit into one line of one "
            "hundred\n"
            "columns, and is broken.\n"
            "\n"
            "  --rename P=R             names\n"
            "  --all                    everything\n");
  EXPECT_EQ(two_commands()[1].line(), "  compare        compare two files\n");
}

}  // namespace
}  // namespace moesh::cli
