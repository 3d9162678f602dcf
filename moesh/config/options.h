#pragma once
// The table of all options. One line in options.cpp is one option: name, member, help, rule.

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "moesh/config/config.h"

namespace moesh::config {

/// What an option takes.
struct Rule {
  double least = -std::numeric_limits<double>::infinity(),
         most = std::numeric_limits<double>::infinity();
  bool above = false, below = false;  // least, most themselves are not allowed
  std::vector<std::string> choices = {};

  bool allows(const Value& value) const;
  /// "an integer, 1 or more", "cpu or cuda", "true or false"; for a value of the type of `like`.
  std::string describe(const Value& like) const;
  /// Of a number alone: "1 or more", "0 to 1".
  std::string range() const;
};

struct Option {
  std::string name;
  std::string help;
  Rule rule;
  Value (*get)(const Config& config);
  void (*set)(Config& config, const Value& value);

  std::string section() const { return name.substr(0, name.find('.')); }
  std::string key() const { return name.substr(name.find('.') + 1); }
  Value initial() const { return get(Config{}); }
};

/// In the order of the sections of Config.
const std::vector<Option>& options();
/// Null if there is none.
const Option* find_option(const std::string& name);

/// Among `names` the one that a person who wrote `wrong` most likely meant: few letters differ, or
/// the key stands in another section.
std::string nearest_name(const std::string& wrong, const std::vector<std::string>& names);

/// The setting's value in the type of `like`; throws Error (config) when it is of another type.
Value converted(const Setting& setting, const Value& like, const Rule& rule = {});

/// --mesh dp_shard=2,tp=2 names degrees by their axes.
struct Degree {
  std::string axis, option;
};
const std::vector<Degree>& degrees();

/// Short forms of single options: --steps is --training.steps.
struct ShortForm {
  std::string name, option;
};
const std::vector<ShortForm>& short_forms();

Value read(const ModelKey& key);

}  // namespace moesh::config
