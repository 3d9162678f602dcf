// Reading: defaults, then the file, then the command line.
#include "moesh/config/config.h"

#include <algorithm>
#include <optional>

#include "moesh/config/options.h"

namespace moesh::config {
namespace {

constexpr const char* kCommandLine = "command line";

std::vector<std::string> option_names() {
  std::vector<std::string> names;
  for (const Option& o : options()) names.push_back(o.name);
  return names;
}

// The model's own keys are known only when the model is: they wait in model.overrides.
bool is_model_key(const std::string& name) {
  return name.starts_with("model.") && !find_option(name);
}

[[noreturn]] void unknown(const Setting& s, std::vector<std::string> known) {
  if (s.origin == kCommandLine) {
    for (std::string& name : known) name = "--" + name;
    throw Error(
        ErrorKind::config,
        detail::concat("unknown option --", s.name, " (command line); the nearest known option is ",
                       nearest_name("--" + s.name, known), ", and --help lists all"));
  }
  throw Error(ErrorKind::config,
              detail::concat(s.origin, ": unknown key ", s.name, "; the nearest known key is ",
                             nearest_name(s.name, known), ", and --help lists all"));
}

// A number of [model] that no model could have.
void check_range(const Setting& s, const ModelKey& key, const Value& value) {
  const auto* whole = std::get_if<std::int64_t>(&value);
  const auto* real = std::get_if<double>(&value);
  if (!whole && !real) return;
  const double number = whole ? static_cast<double>(*whole) : *real,
               least = key.least.value_or(whole ? 1 : 0);
  MOESH_CHECK(number >= least && number <= key.most, ErrorKind::config, s.name, " is ", number,
              " (", s.origin, "); it takes ", least, " to ", key.most);
}

void apply(Config& config, const Setting& s) {
  if (is_model_key(s.name)) {
    config.model.overrides.push_back(s);
    return;
  }
  const Option* o = find_option(s.name);
  if (!o) {
    std::vector<std::string> known = option_names();
    if (s.origin == kCommandLine) {
      for (const ShortForm& f : short_forms()) known.push_back(f.name);
      known.insert(known.end(), {"config", "mesh", "model"});
    }
    unknown(s, known);
  }
  o->set(config, converted(s, o->initial(), o->rule));
  config.origins[o->name] = s.origin;
}

// "dp_shard=2,tp=2,ep=4" is the whole mesh: axes that are not named have size 1.
std::vector<Setting> expand_mesh(const std::string& text) {
  const std::string origin = "command line, --mesh";
  std::vector<Setting> settings;
  for (const Degree& d : degrees()) settings.push_back({d.option, std::int64_t{1}, origin});
  std::vector<std::string> axes;
  for (const Degree& d : degrees()) axes.push_back(d.axis);
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find_first_of(", ", begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    if (part.empty()) continue;
    const auto equals = part.find('=');
    MOESH_CHECK(equals != std::string::npos, ErrorKind::config, "--mesh ", text,
                " (command line): '", part,
                "' has no size; write axes as in --mesh dp_shard=2,tp=2,ep=4");
    const std::string axis = part.substr(0, equals);
    const auto found = std::find(axes.begin(), axes.end(), axis);
    MOESH_CHECK(found != axes.end(), ErrorKind::config, "--mesh ", text,
                " (command line): there is no axis '", axis, "' to set; the nearest is ",
                nearest_name(axis, axes), ", and the axes are ", axes);
    Setting& s = settings[static_cast<std::size_t>(found - axes.begin())];
    MOESH_CHECK(!s.is_text, ErrorKind::config, "--mesh ", text, " (command line): the axis ", axis,
                " has two sizes; keep one of them");
    s.value = part.substr(equals + 1);
    s.is_text = true;
  }
  return settings;
}

// "deepseek_v3:tiny"; without a size the name alone.
std::vector<Setting> expand_model(const std::string& text) {
  const auto colon = text.find(':');
  std::vector<Setting> settings{{"model.name", text.substr(0, colon), kCommandLine, true}};
  if (colon != std::string::npos)
    settings.push_back({"model.size", text.substr(colon + 1), kCommandLine, true});
  return settings;
}

struct CommandLine {
  std::string config_file;
  std::vector<Setting> settings;
};

CommandLine parse(const std::vector<std::string>& args) {
  CommandLine line;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    MOESH_CHECK(
        arg.starts_with("--") && arg.size() > 2, ErrorKind::config, "argument '", arg,
        "' (command line) is not an option; options are written --section.key=value, and --help lists all");
    const auto equals = arg.find('=');
    std::string name = arg.substr(2, equals == std::string::npos ? equals : equals - 2);
    for (const ShortForm& f : short_forms())
      if (name == f.name) name = f.option;

    const bool has_next = i + 1 < args.size() && !args[i + 1].starts_with("--");
    std::string value;
    if (equals != std::string::npos) {
      value = arg.substr(equals + 1);
    } else if (has_next) {
      value = args[++i];
    } else {
      // A flag is true when it is named. Unknown options are reported as such, and not for a
      // missing value.
      const Option* o = find_option(name);
      const bool needs_value = o ? !std::holds_alternative<bool>(o->initial())
                                 : name == "config" || name == "mesh" || name == "model";
      MOESH_CHECK(!needs_value, ErrorKind::config, arg, " (command line) has no value; write ", arg,
                  "=", o ? "VALUE, where it takes " : "VALUE",
                  o ? o->rule.describe(o->initial()) : "");
      value = "true";
    }

    std::vector<Setting> settings{{name, value, kCommandLine, true}};
    if (name == "config") {
      MOESH_CHECK(line.config_file.empty(), ErrorKind::config, "--config ", value,
                  " (command line): there is a --config ", line.config_file,
                  " before it; one file is read, and options on the command line go over it");
      MOESH_CHECK(!value.empty(), ErrorKind::config,
                  "--config (command line) has no value; name a TOML file");
      line.config_file = value;
      continue;
    }
    if (name == "mesh") settings = expand_mesh(value);
    if (name == "model") settings = expand_model(value);
    line.settings.insert(line.settings.end(), settings.begin(), settings.end());
  }
  return line;
}

}  // namespace

std::string Config::origin(const std::string& option) const {
  if (const auto found = origins.find(option); found != origins.end()) return found->second;
  if (is_model_key(option)) return model.name + ":" + model.size;
  const Option* o = find_option(option);
  MOESH_CHECK(o, "no option is called ", option);
  return o->get(*this) == o->initial() ? "default" : "set by the program";
}

Config load_config(const std::vector<std::string>& args) {
  const CommandLine line = parse(args);
  Config config;
  if (!line.config_file.empty())
    for (formats::TomlEntry& entry : formats::read_toml(line.config_file))
      apply(config, {entry.key, entry.value, detail::concat(line.config_file, ":", entry.line)});
  for (const Setting& s : line.settings) apply(config, s);
  return config;
}

void apply_model_keys(Config& config, const ModelKeys& keys) {
  for (const Setting& s : config.model.overrides) {
    const auto key = std::find_if(keys.begin(), keys.end(),
                                  [&](const ModelKey& k) { return s.name == "model." + k.name; });
    if (key == keys.end()) {
      std::vector<std::string> known{"model.name", "model.size"};
      for (const ModelKey& k : keys) known.push_back("model." + k.name);
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
}

MeshShape mesh_shape(const Config& config) {
  const ParallelismSection& p = config.parallelism;
  return MeshShape{.dp_replicate = static_cast<int>(p.data_parallel_replicate_degree),
                   .dp_shard = static_cast<int>(p.data_parallel_shard_degree),
                   .cp = static_cast<int>(p.context_parallel_degree),
                   .tp = static_cast<int>(p.tensor_parallel_degree),
                   .ep = static_cast<int>(p.expert_parallel_degree),
                   .etp = static_cast<int>(p.expert_tensor_parallel_degree)}
      .validated();
}

at::ScalarType scalar_type(const Config& config) {
  check_option(config, "training.dtype");
  if (config.training.dtype == "float64") return at::kDouble;
  return config.training.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
}

at::Device device(const Config& config) {
  return comm::device_for(at::Device(config.training.device), comm::local_process());
}

comm::LaunchOptions launch_options(const Config& config) {
  return {.timeout = std::chrono::milliseconds(
              static_cast<std::int64_t>(config.debug.timeout_seconds * 1000)),
          .checked = config.debug.checked,
          .device = at::Device(config.training.device)};
}

nn::Dispatcher dispatcher(const Config& config) {
  using enum nn::Dispatcher;
  for (nn::Dispatcher d : {automatic, local, all_to_all, all_gather})
    if (config.parallelism.moe_dispatcher == nn::to_string(d)) return d;
  check_option(config, "parallelism.moe_dispatcher");
  throw Error(ErrorKind::internal, "no dispatcher is called " + config.parallelism.moe_dispatcher);
}

data::SampleOrder sample_order(const Config& config) {
  return {.batch = config.data.batch_size,
          .num_dp = config.parallelism.data_parallel_replicate_degree *
                    config.parallelism.data_parallel_shard_degree,
          .num_micro = config.training.gradient_accumulation_steps};
}

data::DatasetOptions dataset_options(const Config& config, std::int64_t vocab_size) {
  return {.kind = config.data.kind,
          .path = config.data.path,
          .sequence_length = config.data.sequence_length,
          .vocab_size = vocab_size,
          .seed = static_cast<std::uint64_t>(config.data.seed),
          .shuffle = config.data.shuffle,
          .synthetic_successors = config.data.synthetic_successors};
}

}  // namespace moesh::config
