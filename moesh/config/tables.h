#pragma once
// Lists of a configuration, [[data.source]]: every entry has the same keys. The key of an entry is
// called by its number, "data.source.0.path", in settings, origins and messages.

#include <optional>
#include <string>
#include <vector>

#include "moesh/config/options.h"

namespace moesh::config {

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
