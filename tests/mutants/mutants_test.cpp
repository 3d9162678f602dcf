// Every mistake of the entries is found by the checks that its entry names, and they say what the
// entry says. The sources with mistakes are linked into this program in place of the originals.

#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "tests/mutants/check.h"
#include "tests/mutants/on.h"

namespace moesh::mutants {
namespace {

struct Finding {
  std::string mutant, check, settings, says;
};

const std::vector<Finding>& findings() {
  static const std::vector<Finding> all{
#include "findings.inc"
  };
  return all;
}

std::map<std::string, Check (*)(Settings&)>& checks() {
  static std::map<std::string, Check (*)(Settings&)> all;
  return all;
}

// Whether `said` begins with `says`, where " ... " stands for any text. A number or a word that
// goes on is another one.
bool matches(const std::string& said, const std::string& says) {
  static const std::string any = " ... ";
  std::size_t from = 0;
  for (std::size_t begin = 0; begin <= says.size();) {
    const std::size_t end = std::min(says.find(any, begin), says.size());
    const std::string phrase = says.substr(begin, end - begin);
    const std::size_t found = said.find(phrase, from);
    if (found == std::string::npos || (begin == 0 && found != 0)) return false;
    from = found + phrase.size();
    if (from < said.size() && std::isalnum(static_cast<unsigned char>(phrase.back())) &&
        std::isalnum(static_cast<unsigned char>(said[from])))
      return false;
    begin = end + any.size();
  }
  return true;
}

std::string test_name(const testing::TestParamInfo<Finding>& info) {
  std::string name = info.param.mutant + "_" + info.param.check + "_" + info.param.settings;
  std::ranges::replace_if(name, [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

class Mutants : public testing::TestWithParam<Finding> {};
INSTANTIATE_TEST_SUITE_P(All, Mutants, testing::ValuesIn(findings()), test_name);

TEST_P(Mutants, IsFound) {
  const Finding& f = GetParam();
  ASSERT_TRUE(checks().contains(f.check)) << "no test provides the check '" << f.check << "'";
  Settings settings(f.settings);
  const Check check = checks().at(f.check)(settings);
  ASSERT_EQ(settings.rest(), "") << "the check '" << f.check << "' has no such settings";
  ASSERT_EQ(check(), "") << "without the mistake";
  const Switched on(f.mutant);
  const std::string said = check();
  ASSERT_NE(said, "") << f.check << " " << f.settings << " does not find it";
  EXPECT_TRUE(matches(said, f.says)) << "it says: " << said << "\nand not:  " << f.says;
}

TEST(MutantsMatch, WordsAndNumbersAreWhole) {
  EXPECT_TRUE(matches("d(x): |delta| = 1; mean over tp 0.5 (mesh tp=2)", "d(x):"));
  EXPECT_TRUE(matches("d(x): |delta| = 1; mean over tp 0.5 (mesh)", "d(x): ... mean over tp 0.5"));
  EXPECT_FALSE(
      matches("d(x): |delta| = 1; mean over tp 0.5 (mesh)", "d(x): ... mean over tp 0.25"));
  EXPECT_FALSE(matches("d(x): mean over tp 0.51", "d(x): ... mean over tp 0.5"));
  EXPECT_FALSE(matches("first d(x):", "d(x):"));
  EXPECT_FALSE(matches("", "d(x):"));
}

TEST(MutantsSwitched, KnowsTheNamesOfTheEntries) {
  EXPECT_THROW(Switched("no_such_mistake"), std::invalid_argument);
}

}  // namespace

Switched::Switched(std::string_view name) {
  if (std::ranges::find(findings(), name, &Finding::mutant) == findings().end())
    throw std::invalid_argument("no entry under tests/mutants has the name '" + std::string(name) +
                                "'");
  current = number_of(name);
}

Switched::~Switched() { current = 0; }

Settings::Settings(const std::string& text) {
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const auto equals = word.find('=');
    values_[word.substr(0, equals)] =
        equals == std::string::npos ? 1 : std::stod(word.substr(equals + 1));
  }
}

double Settings::take(const std::string& name, double missing) {
  const auto node = values_.extract(name);
  return node ? node.mapped() : missing;
}

MeshShape Settings::take_mesh() {
  const auto size = [&](const char* axis) { return static_cast<int>(take(axis, 1)); };
  return {.pp = size("pp"),
          .dp_replicate = size("dp_replicate"),
          .dp_shard = size("dp_shard"),
          .cp = size("cp"),
          .tp = size("tp"),
          .ep = size("ep"),
          .etp = size("etp"),
          .ranks_per_node = static_cast<int>(take("ranks_per_node"))};
}

std::string Settings::rest() const {
  std::string names;
  for (const auto& [name, value] : values_) names += (names.empty() ? "" : " ") + name;
  return names;
}

Provide::Provide(const std::string& name, Check (*make)(Settings&)) { checks()[name] = make; }

}  // namespace moesh::mutants
