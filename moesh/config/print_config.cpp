// The configuration as text: what is set, and what can be set.
#include <algorithm>
#include <cmath>

#include "moesh/config/config.h"
#include "moesh/config/options.h"
#include "moesh/models/registry.h"

namespace moesh::config {
namespace {

struct Line {
  std::string left, right;
};

// Two columns; a left side that is too long gets a line of its own where `wrap` asks for it.
std::string columns(const std::vector<Line>& lines, std::size_t width, const std::string& between,
                    bool wrap) {
  std::string text;
  for (const Line& line : lines) {
    const bool too_long = line.left.size() > width;
    text += line.left;
    if (too_long && wrap) text += "\n" + std::string(width, ' ');
    if (!too_long) text += std::string(width - line.left.size(), ' ');
    text += between + line.right + "\n";
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

}  // namespace

std::string print_config(const Config& config, const ModelKeys& keys) {
  std::string text;
  each_section([&](const std::string& section, const std::vector<Option>& of_section) {
    std::vector<Line> lines;
    for (const Option& o : of_section)
      lines.push_back(
          {o.key() + " = " + formats::to_toml(o.get(config)), in_one_line(config.origin(o.name))});
    if (section == "model") {
      for (const ModelKey& key : keys)
        lines.push_back({key.name + " = " + formats::to_toml(read(key)),
                         in_one_line(config.origin("model." + key.name))});
    }
    text += (text.empty() ? "[" : "\n[") + section + "]\n" + columns(lines, 48, " # ", false);
  });
  return text;
}

std::string help_text(const ModelKeys& keys) {
  constexpr std::size_t kWidth = 48;
  std::string text =
      "Options go into a TOML file, key = value below [section], or on the command line, --section.key=value, which goes over\n"
      "the file. Shown are the defaults.\n\n";
  std::string axes;
  for (const Degree& d : degrees()) axes += (axes.empty() ? "" : ", ") + d.axis;
  std::vector<Line> lines{
      {"  --config FILE", "a TOML file of options"},
      {"  --model NAME:SIZE", "short for model.name and model.size"},
      {"  --mesh dp_shard=2,tp=2,ep=4", "the whole mesh: " + axes + "; others are 1"}};
  for (const ShortForm& f : short_forms())
    lines.push_back({"  --" + f.name + " VALUE", "short for " + f.option});
  text += columns(lines, kWidth, "  ", true);

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
    if (section == "model") {
      for (const std::string& name : models::model_names()) {
        std::string sizes;
        for (const std::string& size : models::model_sizes(name))
          sizes += (sizes.empty() ? "" : ", ") + size;
        lines.push_back({"", "  " + name + ": " + sizes});
      }
      for (const ModelKey& key : keys)
        lines.push_back({"  --model." + key.name + "=" + formats::to_toml(read(key)), key.help});
      if (keys.empty())
        lines.push_back(
            {"  --model.KEY=VALUE", "any size of the model itself; print-config lists them"});
    }
    text += "\n[" + section + "]\n" + columns(lines, kWidth, "  ", true);
  });
  return text;
}

}  // namespace moesh::config
