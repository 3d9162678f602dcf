#include "moesh/config/options.h"

#include <charconv>

namespace moesh::config {
namespace {

template <auto Section, auto List, auto Member>
Column make_column(std::string key, std::string help, ValueRule rule = {}) {
  using Row = typename std::remove_cvref_t<decltype((Config{}.*Section).*List)>::value_type;
  using T = std::remove_cvref_t<decltype(Row{}.*Member)>;
  return {
      .key = std::move(key),
      .help = std::move(help),
      .rule = std::move(rule),
      .initial = Row{}.*Member,
      .get = [](const Config& c, std::size_t row) -> Value {
        return ((c.*Section).*List)[row].*Member;
      },
      .set = [](Config& c, std::size_t row,
                const Value& value) { ((c.*Section).*List)[row].*Member = std::get<T>(value); }};
}

template <auto Section, auto List>
Table make_table(Effect effect, std::string name, std::string help, std::vector<Column> columns) {
  return {.effect = effect,
          .name = std::move(name),
          .help = std::move(help),
          .columns = std::move(columns),
          .size = [](const Config& c) { return ((c.*Section).*List).size(); },
          .resize = [](Config& c, std::size_t size) { ((c.*Section).*List).resize(size); }};
}

// The name of a column is that of its member.
#define MOESH_COLUMN(section, list, row, key, ...) \
  make_column<&Config::section, &decltype(Config::section)::list, &row::key>(#key, __VA_ARGS__)
#define MOESH_TABLE(effect, section, list, help, ...)             \
  make_table<&Config::section, &decltype(Config::section)::list>( \
      Effect::effect, #section "." #list, help, std::vector<Column>{__VA_ARGS__})

std::vector<Table> make_tables() {
  const ValueRule kinds{.choices = data::dataset_choices(/*reads_file=*/true)};
  return {
      MOESH_TABLE(
          numbers, data, source, "several files to train on, instead of data.path",
          MOESH_COLUMN(data, source, data::SourceOptions, path, "file to train on"),
          MOESH_COLUMN(data, source, data::SourceOptions, weight,
                       "share of the sequences, relative to the other files",
                       {.least = 0, .above = true}),
          MOESH_COLUMN(data, source, data::SourceOptions, name, "name in logs; empty: the path"),
          MOESH_COLUMN(data, source, data::SourceOptions, kind,
                       "format of the file, as in data.kind", kinds)),
      MOESH_TABLE(
          output, validation, source, "files to validate on, each with a loss of its own",
          MOESH_COLUMN(validation, source, data::SourceOptions, path, "file to validate on"),
          MOESH_COLUMN(validation, source, data::SourceOptions, name,
                       "name in logs and metrics; empty: the path"),
          MOESH_COLUMN(validation, source, data::SourceOptions, kind,
                       "format of the file, as in data.kind", kinds)),
      MOESH_TABLE(
          numbers, optimizer, group,
          "parameters with other settings; the first group that matches a parameter counts",
          MOESH_COLUMN(
              optimizer, group, optim::GroupOptions, match,
              "regular expression to find in the names of parameters: the names that inspect shows, "
              "but routed experts are experts.w1 (gate), .w3 (up) and .w2 (down)"),
          MOESH_COLUMN(optimizer, group, optim::GroupOptions, lr_scale,
                       "factor on the learning rate; 0: the parameters stay as they are",
                       {.least = 0}),
          MOESH_COLUMN(
              optimizer, group, optim::GroupOptions, weight_decay,
              "weight decay of the group, also of norms and biases; -1: optimizer.weight_decay",
              {.least = -1})),
  };
}

}  // namespace

const std::vector<Table>& tables() {
  static const std::vector<Table> all = make_tables();
  return all;
}

std::string Cell::name() const { return detail::concat(table->name, ".", row, ".", column->key); }

std::optional<Cell> find_cell(const std::string& name) {
  for (const Table& t : tables()) {
    if (!name.starts_with(t.name + ".")) continue;
    const char *begin = name.data() + t.name.size() + 1, *end = name.data() + name.size();
    std::size_t row = 0;
    const auto [after, error] = std::from_chars(begin, end, row);
    if (error != std::errc{} || after == end || *after != '.') continue;
    for (const Column& c : t.columns)
      if (std::string(after + 1, end) == c.key) return Cell{&t, row, &c};
  }
  return std::nullopt;
}

std::vector<Cell> cells(const Config& config) {
  std::vector<Cell> all;
  for (const Table& t : tables())
    for (std::size_t row = 0; row < t.size(config); ++row)
      for (const Column& c : t.columns) all.push_back({&t, row, &c});
  return all;
}

std::vector<std::string> cell_names() {
  std::vector<std::string> names;
  for (const Table& t : tables())
    for (const Column& c : t.columns) names.push_back(t.name + ".0." + c.key);
  return names;
}

}  // namespace moesh::config
