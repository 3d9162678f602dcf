#pragma once
// The table of all options, and lists of tables such as [[data.source]].

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "moesh/config/config.h"
#include "moesh/config/merge.h"

namespace moesh::config {

// The table of all options. One line in options.cpp is one option: effect, name and member, help,
// rule.

/// The kinds of values that an option takes.
struct ValueRule {
  double least = -std::numeric_limits<double>::infinity(),
         most = std::numeric_limits<double>::infinity();
  bool above = false, below = false;  // least, most themselves are not allowed
  std::vector<std::string> choices = {};

  bool allows(const Value& value) const;
  /// "an integer, 1 or more", "cpu or cuda", "true or false"; for a value of the type of `like`.
  std::string describe(const Value& like) const;
  /// The range of a number: "1 or more", "0 to 1".
  std::string range() const;
};

/// What changes with the value of an option. All keys of the model change numbers.
enum class Effect : std::uint8_t {
  numbers,  // what a step computes: `verify` must run with it, and tests/verify sees that it does
  speed,    // how it is computed: time, memory, messages; the numbers but for their rounding stay
  output    // which steps are run, logged or saved, and where
};

struct Option {
  Effect effect;
  std::string name;
  std::string help;
  ValueRule rule;
  Value (*get)(const Config& config);
  void (*set)(Config& config, const Value& value);
  Value (*of_model)(const models::ModelFacts& facts) = nullptr;  // the default, where models differ

  std::string section() const { return name.substr(0, name.find('.')); }
  std::string key() const { return name.substr(name.find('.') + 1); }
  Value initial() const { return get(Config{}); }
  /// Its default.
  Value default_in(const Config& config) const {
    return of_model ? of_model(models::facts(config.model.architecture)) : initial();
  }
  Option with_default(Value (*default_of)(const models::ModelFacts& facts)) && {
    of_model = default_of;
    return std::move(*this);
  }
};

/// The option of a member of Config, with its effect, which has no default.
template <Effect effect, auto Section, auto Member>
Option make_option(std::string name, std::string help, ValueRule rule = {}) {
  using T = std::remove_cvref_t<decltype((Config{}.*Section).*Member)>;
  return {.effect = effect,
          .name = std::move(name),
          .help = std::move(help),
          .rule = std::move(rule),
          .get = [](const Config& c) -> Value { return (c.*Section).*Member; },
          .set = [](Config& c, const Value& value) { (c.*Section).*Member = std::get<T>(value); }};
}

/// In the order of the sections of Config.
const std::vector<Option>& options();
/// Null if there is none.
const Option* find_option(const std::string& name);
/// The rule of a single option on its value: its range, or the texts that it takes.
void check_option(const Config& config, const std::string& option);

/// "deepseek_v3 tiny", or "deepseek_v3 of FOLDER" where a config.json says what it is.
std::string model_title(const Config& config);
/// The same as --model takes it: "deepseek_v3:tiny", "hf:FOLDER".
std::string model_argument(const Config& config);
/// What the keys of [model] change: without a size any built-in one, since they are all given.
models::AnyConfig built_in_model(const ModelSection& model);

/// The values of all that changes numbers, options and keys of the model, as text: two runs with
/// the same text compute the same.
std::string numbers_of(const Config& config);

/// The setting's value in the type of `like`; throws Error (config) when it is of another type.
Value converted(const Setting& setting, const Value& like, const ValueRule& rule = {});

/// --mesh dp_shard=2,tp=2 names degrees by their axes.
struct Degree {
  Axes of;
  std::string option;
  std::string axis = to_string(of);
  std::int64_t size(const MeshShape& shape) const { return shape.size(of); }
};
const std::vector<Degree>& degrees();

/// Short forms of single options: --steps is --training.steps.
struct ShortForm {
  std::string name, option;
};
const std::vector<ShortForm>& short_forms();

Value read(const models::ModelKey& key);
/// The keys of the model, "model.dim", with their values.
std::vector<std::pair<std::string, Value>> model_values(const Config& config);
/// Nothing where the model has no such key.
std::optional<Value> model_value(const Config& config, const std::string& name);

// Lists of a configuration, [[data.source]]: every entry has the same keys. The key of an entry is
// called by its number, "data.source.0.path", in settings, origins and messages.

struct Column {
  std::string key, help;
  ValueRule rule;
  Value initial;
  Value (*get)(const Config& config, std::size_t row);
  void (*set)(Config& config, std::size_t row, const Value& value);
};

struct Table {
  Effect effect;
  std::string name;  // "data.source"
  std::string help;
  std::vector<Column> columns;
  std::size_t (*size)(const Config& config);
  void (*resize)(Config& config, std::size_t size);

  std::string section() const { return name.substr(0, name.find('.')); }
};

/// In the order of the sections of Config.
const std::vector<Table>& tables();

/// One key of one entry, which need not exist yet.
struct Cell {
  const Table* table;
  std::size_t row;
  const Column* column;

  std::string name() const;
  Value get(const Config& config) const { return column->get(config, row); }
};
/// Nothing where the name is not that of a table, a number and a key.
std::optional<Cell> find_cell(const std::string& name);
/// The cells of all entries.
std::vector<Cell> cells(const Config& config);
/// "data.source.N.path" and so on, to look for a name.
std::vector<std::string> cell_names();

}  // namespace moesh::config
