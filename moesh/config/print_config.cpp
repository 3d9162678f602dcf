// The configuration as text: what is set, and what can be set.
#include <algorithm>
#include <cmath>

#include "moesh/config/config.h"
#include "moesh/config/options.h"
#include "moesh/models/disk.h"
#include "moesh/models/registry.h"

namespace moesh::config {
namespace {

struct Line {
  std::string left, right;
};

constexpr std::size_t kLeft = 48, kLineWidth = 100;

std::string pad(const std::string& text) {
  return text + std::string(kLeft - std::min(kLeft, text.size()), ' ');
}

// Two columns. The right one is broken between words where the line would be too long, and a left
// side that is too long gets a line of its own.
std::string help_columns(const std::vector<Line>& lines) {
  std::string text;
  for (const Line& line : lines) {
    const bool too_long = line.left.size() > kLeft;
    text += too_long ? line.left + "\n" + pad("") : pad(line.left);
    std::string rest = "  " + line.right;
    while (kLeft + rest.size() > kLineWidth) {
      const std::size_t cut = rest.rfind(' ', kLineWidth - kLeft);
      if (cut == std::string::npos || cut < 4) break;  // one long word
      text += rest.substr(0, cut) + "\n" + pad("");
      rest = "    " + rest.substr(cut + 1);
    }
    text += rest + "\n";
  }
  return text;
}

// One line, whatever a file is called.
std::string in_one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

// f(section, options of it) for each section, in the order of the table.
template <class F>
void each_section(F f) {
  const std::vector<Option>& all = options();
  for (auto begin = all.begin(); begin != all.end();) {
    const auto end = std::find_if(begin, all.end(),
                                  [&](const Option& o) { return o.section() != begin->section(); });
    f(begin->section(), std::vector<Option>(begin, end));
    begin = end;
  }
}

// Whether name, size and keys say what the model is: a config.json may have more, such as how
// positions are stretched.
bool keys_say_all(const Config& config) {
  if (config.model.folder.empty()) return true;
  models::AnyConfig ours = config.model.architecture;
  models::AnyConfig read_back = built_in_model(config.model);
  const models::ModelKeys from = models::keys(ours), to = models::keys(read_back);
  for (std::size_t i = 0; i < from.size(); ++i)
    std::visit(
        [&](auto* target) {
          *target = *std::get<std::remove_cvref_t<decltype(target)>>(from[i].target);
        },
        to[i].target);
  try {
    const auto json = [](const models::AnyConfig& c) {
      return models::on_disk(c).config_json(formats::Dtype::f32);
    };
    return json(ours) == json(read_back);
  } catch (const Error&) {  // it has no config.json of its own
    return false;
  }
}

}  // namespace

std::string print_config(const Config& config, const std::map<std::string, std::string>& notes) {
  std::string text;
  const auto line = [&](const std::string& key, const std::string& name, const Value& value) {
    const std::string origin =
        name == "model.folder" ? "what the model is" : config.origin(name).text;
    const auto note = notes.find(name);
    return pad(key + " = " + formats::to_toml(value)) + " # " + in_one_line(origin) +
           (note == notes.end() ? "" : "; " + in_one_line(note->second)) + "\n";
  };
  each_section([&](const std::string& section, const std::vector<Option>& of_section) {
    std::vector<std::pair<std::string, Value>> values;
    if (section == "model" && !keys_say_all(config))
      values.emplace_back("model.folder", config.model.folder);
    else
      for (const Option& o : of_section) values.emplace_back(o.name, o.get(config));
    if (section == "model")
      for (auto& key : model_values(config)) values.push_back(std::move(key));
    text += (text.empty() ? "[" : "\n[") + section + "]\n";
    for (const auto& [name, value] : values)
      text += line(name.substr(section.size() + 1), name, value);
    for (const Cell& cell : cells(config)) {
      if (cell.table->section() != section) continue;
      if (cell.column == &cell.table->columns.front()) text += "[[" + cell.table->name + "]]\n";
      text += line(cell.column->key, cell.name(), cell.get(config));
    }
  });
  return text;
}

std::string help_text(const Config& config) {
  std::string text =
      "Options go into a TOML file, key = value below [section], or on the command line,\n"
      "--section.key=value, which overrides the file. The values shown are defaults.\n\n";
  std::string axes;
  for (const Degree& d : degrees()) axes += (axes.empty() ? "" : ", ") + d.axis;
  std::vector<Line> lines{
      {"  --config FILE", "a TOML file of options"},
      {"  --model NAME:SIZE", "short for model.name and model.size"},
      {"  --model hf:FOLDER",
       "the model of a folder's config.json, with its weights; short for model.folder"},
      {"  --mesh dp_shard=2,tp=2,ep=4", "the whole mesh: " + axes + "; others are 1"}};
  for (const ShortForm& f : short_forms())
    lines.push_back({"  --" + f.name + " VALUE", "short for " + f.option});
  text += help_columns(lines);

  each_section([&](const std::string& section, const std::vector<Option>& of_section) {
    lines.clear();
    for (const Option& o : of_section) {
      std::string takes;
      if (!o.rule.choices.empty())
        takes = " (" + o.rule.describe(o.initial()) + ")";
      else if (std::isfinite(o.rule.least))
        takes = " (" + o.rule.range() + ")";
      lines.push_back({"  --" + o.name + "=" + formats::to_toml(o.initial()), o.help + takes});
    }
    for (const Table& t : tables()) {
      if (t.section() != section) continue;
      lines.push_back(
          {"  [[" + t.name + "]], --" + t.name + ".0." + t.columns.front().key, t.help});
      for (const Column& c : t.columns)
        lines.push_back({"    " + c.key + " = " + formats::to_toml(c.initial), c.help});
    }
    if (section == "model") {
      for (const std::string& name : models::model_names()) {
        std::string sizes;
        for (const std::string& size : models::model_sizes(name))
          sizes += (sizes.empty() ? "" : ", ") + size;
        lines.push_back({"", "  " + name + ": " + sizes});
      }
      models::AnyConfig copy = config.model.architecture;
      for (const models::ModelKey& key : models::keys(copy))
        lines.push_back({"  --model." + key.name + "=" + formats::to_toml(read(key)), key.help});
    }
    text += "\n[" + section + "]\n" + help_columns(lines);
  });
  return text;
}

}  // namespace moesh::config
