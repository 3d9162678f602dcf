// Reading and merging: the command's defaults, then the file, then the command line.
#include "moesh/config/merge.h"

#include <algorithm>
#include <filesystem>

#include "moesh/base/text.h"
#include "moesh/config/options.h"
#include "moesh/formats/disk.h"
#include "moesh/formats/file.h"
#include "moesh/formats/name.h"
#include "moesh/formats/safetensors.h"
#include "moesh/models/disk.h"

namespace moesh::config {
namespace {

constexpr const char* kCommandLine = "command line";

std::vector<std::string> option_names() {
  std::vector<std::string> names;
  for (const Option& o : options()) names.push_back(o.name);
  return names;
}

// The model's own keys are known only when the model is.
bool is_model_key(const std::string& name) {
  return name.starts_with("model.") && !find_option(name);
}

bool names_model(const Setting& s) { return s.name == "model.name" || s.name == "model.size"; }

// The list that `name`, of its own or of an entry, is meant to be: "data.sources.0.path" is of
// data.source, and so is "data.source.path", of a table [data.source]. Empty where none is near.
std::string list_near(const std::string& name) {
  for (const Table& table : tables())
    for (const std::string& near : {table.name, table.name + "s"})
      if (name == near || name.starts_with(near + ".")) return table.name;
  return "";
}

[[noreturn]] void unknown(const Setting& s, const std::vector<std::string>& known) {
  const bool on_line = s.origin.text == kCommandLine;
  const auto* value = std::get_if<std::string>(&s.value);
  const auto answer = answer_to(s.name, value ? *value : formats::to_toml(s.value));
  const std::string list = list_near(s.name);
  const auto nearest = nearest_name(s.name, known);
  std::string hint =
      !list.empty() ? detail::concat(list, " is a list: write each entry below a line [[", list,
                                     "]], or on the command line --", list, ".0.path=FILE")
      : answer      ? (answer->starts_with("--") ? "here it is " : "") + *answer
      : nearest
          ? detail::concat("the nearest known ", on_line ? "option" : "key", " is --", *nearest)
          : "";
  if (!on_line && list.empty())  // a file has keys, without dashes
    for (auto at = hint.find("--"); at != std::string::npos; at = hint.find("--"))
      hint.erase(at, 2);
  throw Error(ErrorKind::config,
              detail::concat(on_line ? "unknown option --" : s.origin.text + ": unknown key ",
                             s.name, on_line ? " (command line); " : "; ", hint,
                             hint.empty() ? "moesh help COMMAND lists the options"
                                          : ", and --help lists all"));
}

// A number of [model] that no model could have.
void check_range(const Setting& s, const models::ModelKey& key, const Value& value) {
  const auto* whole = std::get_if<std::int64_t>(&value);
  const auto* real = std::get_if<double>(&value);
  if (!whole && !real) return;
  const double number = whole ? static_cast<double>(*whole) : *real,
               least = key.least.value_or(whole ? 1 : 0);
  MOESH_CHECK(number >= least && number <= key.most, ErrorKind::config, s.name, " is ", number,
              " (", s.origin.text, "); it takes ", least, " to ", key.most);
}

std::string axis_hint(const std::string& axis, const std::vector<std::string>& axes) {
  if (axis == "efsdp") return "it follows from the others: leave it out, and ";
  if (const auto elsewhere = axis_elsewhere(axis)) return "here it is " + *elsewhere + ", and ";
  const auto nearest = nearest_name(axis, axes);
  return nearest ? "the nearest is " + *nearest + ", and " : "";
}

// How a short form is written at `origin`: --mesh on the command line.
std::string written(const char* name, const std::string& origin) {
  return origin == kCommandLine ? detail::concat("--", name) : name;
}

// "dp_shard=2,tp=2,ep=4" is the whole mesh: axes that are not named have size 1.
Settings expand_mesh(const std::string& text, const std::string& origin) {
  const std::string mesh = written("mesh", origin);
  Settings settings = mesh_settings({}, detail::concat(origin, ", ", mesh));
  std::vector<std::string> axes;
  for (const Degree& d : degrees()) axes.push_back(d.axis);
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find_first_of(", ", begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (word.empty()) continue;
    const auto equals = word.find('=');
    MOESH_CHECK(equals != std::string::npos, ErrorKind::config, mesh, " ", text, " (", origin,
                "): '", word, "' has no size; write axes as in ", mesh, " dp_shard=2,tp=2,ep=4");
    const std::string axis = word.substr(0, equals);
    const auto found = std::find(axes.begin(), axes.end(), axis);
    MOESH_CHECK(found != axes.end(), ErrorKind::config, mesh, " ", text, " (", origin,
                "): there is no axis '", axis, "' to set; ", axis_hint(axis, axes), "the axes are ",
                axes);
    Setting& s = settings[static_cast<std::size_t>(found - axes.begin())];
    MOESH_CHECK(!s.is_text, ErrorKind::config, mesh, " ", text, " (", origin, "): the axis ", axis,
                " has two sizes; keep one of them");
    s.value = word.substr(equals + 1);
    s.is_text = true;
  }
  return settings;
}

constexpr const char* kFolder = "model.folder";
constexpr const char* kInitialLoad = "checkpoint.initial_load";
constexpr std::size_t kMaxConfigBytes = 16 << 20;

// Whether there is such a folder, or a file. The text need not be the name of anything.
bool is_there(const std::string& text, bool as_folder) {
  try {
    return formats::exists(text) && formats::is_folder(text) == as_folder;
  } catch (const Error&) {
    return false;
  }
}

// For a folder that is not there.
std::string how_to_get(const std::string& folder) {
  const std::string cure = formats::how_to_download(folder, "--model hf:");
  return cure.empty() ? "name the folder that holds the model's config.json" : cure;
}

// "deepseek_v3:tiny"; without a size only the name. "hf:FOLDER" is a folder.
Settings expand_model(const std::string& text, const std::string& origin) {
  const std::string model = written("model", origin);
  const auto colon = text.find(':');
  if (text.substr(0, colon) == "hf")
    return {{kFolder, text.substr(std::min(text.size(), 3ul)), {origin}, true}};
  const auto names = models::model_names();
  MOESH_CHECK(std::find(names.begin(), names.end(), text.substr(0, colon)) != names.end() ||
                  !is_there(text, /*as_folder=*/true),
              ErrorKind::config, model, " ", text, " (", origin, ") is a folder; write ", model,
              " hf:", text, " for the model that is in it");
  MOESH_CHECK(text.find('/') == std::string::npos, ErrorKind::config, model, " ", text, " (",
              origin, ") names neither a built-in model nor a folder; ", how_to_get(text));
  Settings settings{{"model.name", text.substr(0, colon), {origin}, true}};
  if (colon != std::string::npos)
    settings.push_back({"model.size", text.substr(colon + 1), {origin}, true});
  return settings;
}

// The value of an option without "=": the next word, or "true" for a flag without one. `next` moves
// over what was taken.
std::string value_of(const std::string& arg, const std::string& name,
                     const std::vector<std::string>& args, std::size_t& next) {
  if (next < args.size() && !args[next].starts_with("--")) return args[next++];
  // Unknown options are reported as such, and not for a missing value.
  const Option* o = find_option(name);
  const bool needs_value = o ? !std::holds_alternative<bool>(o->initial())
                             : name == "config" || name == "mesh" || name == "model";
  MOESH_CHECK(!needs_value, ErrorKind::config, arg, " (command line) has no value; write ", arg,
              "=", o ? "VALUE, where it takes " : "VALUE", o ? o->rule.describe(o->initial()) : "");
  return "true";
}

// An index whose files are missing counts too: loading then says which, and no run begins with
// random weights because a download was incomplete.
bool has_weights(const std::filesystem::path& folder) {
  const auto names = formats::names_in(folder);
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name.ends_with(".safetensors") || name == formats::kIndexFile;
  });
}

models::AnyConfig config_of(const std::filesystem::path& folder, const std::string& file) {
  const auto text = formats::read_file(file, ErrorKind::config, kMaxConfigBytes);
  return models::config_of(formats::with_layers_that_are_there(text, folder), file);
}

std::string text_of(const Setting& s) { return std::get<std::string>(converted(s, std::string())); }

// The model of a folder: of model.folder, which leaves the settings and starts from the weights
// that are there, or of checkpoint.initial_load where nothing is said of a model. A name that fits
// not a folder is left to the code that loads it.
std::optional<RequestedModel> take_folder(Settings& settings) {
  const auto last = [&](const char* name) -> std::optional<Setting> {
    const auto found = std::find_if(settings.rbegin(), settings.rend(),
                                    [&](const Setting& s) { return s.name == name; });
    return found == settings.rend() ? std::nullopt : std::optional(*found);
  };
  const auto asked = last(kFolder), initial = last(kInitialLoad);
  if (!asked) {
    const bool names_any = std::any_of(settings.begin(), settings.end(), [](const Setting& s) {
      return s.name.starts_with("model.");
    });
    if (names_any || !initial) return std::nullopt;
  }
  const std::filesystem::path folder = text_of(asked ? *asked : *initial);
  const std::string file = (folder / "config.json").string();
  if (!asked) {
    if (folder.empty() || !formats::exists(file)) return std::nullopt;
    return RequestedModel{config_of(folder, file), file, folder.string()};
  }
  MOESH_CHECK(!folder.empty(), ErrorKind::config, kFolder, " (", asked->origin.text,
              ") has no value; name the folder of a Hugging Face model, as in --model hf:FOLDER");
  for (const Setting& s : settings)
    MOESH_CHECK(!names_model(s), ErrorKind::config, kFolder, " is '", folder.string(), "' (",
                asked->origin.text, "), and ", s.name, " is '", text_of(s), "' (", s.origin.text,
                "): the folder says which model it is; leave out one of them");
  MOESH_CHECK(!is_there(folder.string(), /*as_folder=*/false), ErrorKind::config, kFolder, " is '",
              folder.string(), "' (", asked->origin.text,
              "), which is not a folder; name the one that it is in: --model hf:",
              folder.has_parent_path() ? folder.parent_path().string() : ".");
  MOESH_CHECK(is_there(folder.string(), /*as_folder=*/true), ErrorKind::config, kFolder, " is '",
              folder.string(), "' (", asked->origin.text, "), and there is no such folder; ",
              how_to_get(folder.string()));
  MOESH_CHECK(formats::exists(file), ErrorKind::config, kFolder, " is '", folder.string(), "' (",
              asked->origin.text, "), which has no config.json",
              formats::checkpoints_instead(folder));
  std::erase_if(settings, [](const Setting& s) { return s.name == kFolder; });
  if (!initial && has_weights(folder)) settings.push_back({kInitialLoad, folder.string(), {file}});
  return RequestedModel{config_of(folder, file), file, folder.string()};
}

void append(Settings& to, const Settings& more) { to.insert(to.end(), more.begin(), more.end()); }

// None where no file is named.
Settings settings_of_file(const std::string& file) {
  Settings settings;
  if (!file.empty())
    for (const formats::TomlEntry& entry : formats::read_toml(file))
      settings.push_back({entry.key, entry.value, {detail::concat(file, ":", entry.line)}});
  return settings;
}

// An entry begins with the first of its keys; they are numbered without holes.
void apply_cell(Config& config, const Cell& cell, const Setting& s) {
  const std::size_t size = cell.table->size(config);
  MOESH_CHECK(cell.row <= size, ErrorKind::config, s.name, " (", s.origin.text, ") is of entry ",
              cell.row, ", and there are ", size, " of ", cell.table->name,
              " before it; entries are numbered from 0 without holes");
  if (cell.row == size) cell.table->resize(config, size + 1);
  cell.column->set(config, cell.row, converted(s, cell.column->initial, cell.column->rule));
  config.origins[s.name] = s.origin;
}

void apply(Config& config, const Setting& s) {
  if (const auto cell = find_cell(s.name)) return apply_cell(config, *cell, s);
  const Option* o = find_option(s.name);
  if (!o) {
    std::vector<std::string> known = option_names();
    const auto of_tables = cell_names();
    known.insert(known.end(), of_tables.begin(), of_tables.end());
    models::each_model([&]<class Model> {  // which one it is to be is not known yet
      for (const models::ModelKey& key : Model().keys()) known.push_back("model." + key.name);
    });
    if (s.origin.text == kCommandLine) {
      for (const ShortForm& f : short_forms()) known.push_back(f.name);
      known.insert(known.end(), {"config", "mesh", "model"});
    }
    unknown(s, known);
  }
  o->set(config, converted(s, o->initial(), o->rule));
  config.origins[o->name] = s.origin;
}

void apply_key(Config& config, const Setting& s) {
  const models::ModelKeys keys = models::keys(config.model.architecture);
  const auto key = std::find_if(keys.begin(), keys.end(), [&](const models::ModelKey& k) {
    return s.name == "model." + k.name;
  });
  if (key == keys.end()) {
    std::vector<std::string> known{"model.name", "model.size"};
    for (const models::ModelKey& k : keys) known.push_back("model." + k.name);
    for (const std::string& name : option_names())
      if (!name.starts_with("model.")) known.push_back(name);
    unknown(s, known);
  }
  const Value value = converted(s, read(*key));
  check_range(s, *key, value);
  std::visit(
      [&](auto* target) { *target = std::get<std::remove_pointer_t<decltype(target)>>(value); },
      key->target);
  config.origins[s.name] = s.origin;
}

// Without a size, as a run prints the model of a folder, every key must say what it is.
void check_keys_given(const Config& config, const Settings& settings) {
  if (!config.model.size.empty()) return;
  for (const auto& [key, value] : model_values(config))
    MOESH_CHECK(std::any_of(settings.begin(), settings.end(),
                            [&](const Setting& s) { return s.name == key; }),
                ErrorKind::config, describe_option(config, "model.size"), ", and ", key,
                " is not set; set every key of [model], or model.size to ",
                joined_by_or(models::model_sizes(config.model.name)));
}

// The one place in which a Config changes: the copy that becomes the result.
Config closed(Config config, const Settings& settings, const std::optional<RequestedModel>& model) {
  for (const Setting& s : settings)
    if (!is_model_key(s.name)) apply(config, s);
  ModelSection& m = config.model;
  if (model) {
    m.architecture = model->architecture, m.name = models::name(m.architecture);
    const auto sizes = models::model_sizes(m.name);
    if (!model->folder.empty()) m.folder = model->folder, m.size.clear();
    if (std::find(sizes.begin(), sizes.end(), m.size) == sizes.end()) m.size.clear();
    config.origins["model.name"] = config.origins["model.size"] = {model->origin};
    for (const auto& [key, value] : model_values(config)) config.origins[key] = {model->origin};
  } else if (std::any_of(settings.begin(), settings.end(), names_model)) {
    check_option(config, "model.size");
    m.architecture = built_in_model(m), m.folder.clear();
    std::erase_if(config.origins, [](const auto& entry) { return is_model_key(entry.first); });
    check_keys_given(config, settings);
  }
  for (const Setting& s : settings)
    if (is_model_key(s.name)) apply_key(config, s);
  for (const Option& o : options())
    if (o.of_model && !config.origins.contains(o.name)) o.set(config, o.default_in(config));
  validate(config);
  return config;
}

}  // namespace

Settings read_arguments(const std::vector<std::string>& args) {
  std::string file;
  Settings line;
  for (std::size_t i = 0; i < args.size();) {
    const std::string& arg = args[i++];
    MOESH_CHECK(arg.starts_with("--") && arg.size() > 2, ErrorKind::config, "argument '", arg,
                "' (command line) is not an option; options are written --section.key=value, and "
                "--help lists all");
    const auto equals = arg.find('=');
    std::string name = arg.substr(2, equals == std::string::npos ? equals : equals - 2);
    for (const ShortForm& f : short_forms())
      if (name == f.name) name = f.option;
    const std::string value =
        equals != std::string::npos ? arg.substr(equals + 1) : value_of(arg, name, args, i);
    if (name == "config") {
      MOESH_CHECK(file.empty(), ErrorKind::config, "--config ", value,
                  " (command line): there is a --config ", file,
                  " before it; one file is read, and options on the command line override it");
      MOESH_CHECK(!value.empty(), ErrorKind::config,
                  "--config (command line) has no value; name a TOML file");
      file = value;
    } else {
      append(line, name == "mesh"    ? expand_mesh(value, kCommandLine)
                   : name == "model" ? expand_model(value, kCommandLine)
                                     : Settings{{name, value, {kCommandLine}, true}});
    }
  }
  Settings all = settings_of_file(file);
  append(all, line);
  return all;
}

Settings read_values(const std::vector<std::pair<std::string, Value>>& values,
                     const std::string& origin) {
  std::string file;
  Settings own;
  for (const auto& [given, value] : values) {
    std::string name = given;
    std::replace(name.begin(), name.end(), '_', '-');
    const auto form = std::find_if(short_forms().begin(), short_forms().end(),
                                   [&](const ShortForm& f) { return f.name == name; });
    if (given == "config" || given == "mesh" || given == "model") {
      const std::string text = text_of({given, value, {origin}});
      if (given == "config")
        file = text;
      else
        append(own, given == "mesh" ? expand_mesh(text, origin) : expand_model(text, origin));
    } else {
      own.push_back({form == short_forms().end() ? given : form->option, value, {origin}});
    }
  }
  Settings all = settings_of_file(file);
  append(all, own);
  return all;
}

Settings mesh_settings(const MeshShape& shape, const std::string& origin) {
  Settings settings;
  for (const Degree& d : degrees()) settings.push_back({d.option, d.size(shape), {origin}});
  if (shape.ranks_per_node > 0)
    settings.push_back(
        {"parallelism.ranks_per_node", std::int64_t{shape.ranks_per_node}, {origin}});
  return settings;
}

std::string mesh_argument(const MeshShape& shape) {
  std::string text;
  for (const Degree& d : degrees())
    if (d.size(shape) > 1)
      text += detail::concat(text.empty() ? "" : ",", d.axis, "=", d.size(shape));
  return text.empty() ? "dp_shard=1" : text;
}

Config merged(const Settings& settings, const std::optional<RequestedModel>& model) {
  return closed({}, settings, model);
}

Config changed(const Config& config, const Settings& settings,
               const std::optional<RequestedModel>& model) {
  return closed(config, settings, model);
}

Config load_config(const std::vector<std::string>& args, const Settings& defaults) {
  return load_settings(read_arguments(args), defaults);
}

Config load_settings(const Settings& given, const Settings& defaults) {
  Settings settings = defaults;
  append(settings, given);
  const auto model = take_folder(settings);
  return merged(settings, model);
}

}  // namespace moesh::config
