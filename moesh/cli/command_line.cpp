#include "moesh/cli/command_line.h"

#include <fcntl.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/config/merge.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"

namespace moesh::cli {
namespace {

constexpr const char* kLogLevel = "--log-level";
constexpr std::size_t kColumns = 100, kLineColumn = 17, kOptionColumn = 27;

// `head`, and from `column` on the words of `text`, in lines that fit.
std::string in_columns(std::string head, std::size_t column, const std::string& text) {
  if (head.size() + 1 < column || head.empty())
    head.resize(column, ' ');
  else
    head += "   ";
  std::string lines, line = head;
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find(' ', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const bool is_empty = line.empty() || line.back() == ' ';
    if (!is_empty && line.size() + 1 + word.size() > kColumns) {
      lines += line + "\n";
      line = std::string(column, ' ') + word;
    } else {
      line += (is_empty ? "" : " ") + word;
    }
  }
  return lines + line + "\n";
}

bool takes_value(const CommandOption& o) { return !o.value.empty() && o.value[0] != '['; }

// Values are texts for CLI11: what they must be is said here, with the way out.
void add(CLI::App& app, const CommandOption& o) {
  if (o.value.empty()) {
    app.add_flag(o.name)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    return;
  }
  // A value may be missing as far as CLI11 knows: else it would take the next option for one.
  app.add_option(o.name)->expected(0, 1)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

// "--out=" has no value, and CLI11 would take the next word for it; "--all=false" would be --all.
void refuse_values(const Command& command, const Args& args) {
  for (const CommandOption& o : command.options)
    for (const std::string& arg : args) {
      if (!arg.starts_with(o.name + "=")) continue;
      MOESH_CHECK(!o.value.empty(), ErrorKind::config, o.name, " takes no value; '", arg,
                  "' has one: write ", o.name, " without it, or leave both out");
      MOESH_CHECK(arg.size() > o.name.size() + 1, ErrorKind::config, o.name,
                  " needs a value, as in ", o.name, "=", o.value);
    }
}

// A value may begin with a dash, as a prompt may: CLI11 would take "-x" for an option.
Args with_dashed_values(const std::vector<Command>& commands, Args args) {
  const auto of_word = [&](const std::string& word) {
    for (const Command& c : commands)
      for (const CommandOption& o : c.options)
        if (o.name == word && takes_value(o)) return true;
    return false;
  };
  for (std::size_t i = 0; i + 1 < args.size(); ++i) {
    const std::string& next = args[i + 1];
    if (!of_word(args[i]) || next.size() < 2 || next[0] != '-' || next[1] == '-' || next == "-h")
      continue;
    args[i] += "=" + next;
    args.erase(args.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  }
  return args;
}

Args values_of(const CLI::App& app, const CommandOption& o) {
  const Args values = app.get_option(o.name)->results();
  for (const std::string& value : values)
    MOESH_CHECK(!takes_value(o) || !value.empty(), ErrorKind::config, o.name,
                " needs a value, as in ", o.name, "=...");
  MOESH_CHECK(o.may_repeat || values.size() == 1, ErrorKind::config,
              app.get_name().empty() ? "moesh" : app.get_name(), " has ", o.name,
              values.size() == 2 ? " twice" : " several times", "; keep one of them");
  return values;
}

[[noreturn]] void throw_no_command(const std::vector<Command>& commands, const std::string& name) {
  std::string names;
  for (std::size_t i = 0; i < commands.size(); ++i)
    names += (i == 0 ? "" : i + 1 < commands.size() ? ", " : " and ") + commands[i].name;
  throw Error(ErrorKind::config,
              detail::concat("there is no command '", name, "'; the commands are ", names));
}

// "usage: moesh compare A B [OPTIONS]; moesh help compare lists them"
std::string usage_of(const Command& command) {
  if (command.options.empty() && !command.takes_config)
    return detail::concat("usage: ", command.usage(), "; it takes no options");
  return detail::concat("usage: ", command.usage(), "; moesh help ", command.name,
                        " lists its options");
}

[[noreturn]] void throw_no_option(const Command& command, const std::string& arg) {
  std::vector<std::string> known;
  for (const CommandOption& o : command.options) known.push_back(o.name);
  const auto nearest = config::nearest_name(arg.substr(0, arg.find('=')), known);
  throw Error(ErrorKind::config,
              detail::concat(command.name, " has no option '", arg, "'; ",
                             nearest ? "the nearest that it has is " + *nearest + "; " : "",
                             usage_of(command)));
}

}  // namespace

std::optional<std::string> Arguments::text(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? std::nullopt : std::optional(found->second.front());
}

Args Arguments::texts(const std::string& name) const {
  const auto found = values_.find(name);
  return found == values_.end() ? Args{} : found->second;
}

int Arguments::number(const std::string& name, int initial, int least) const {
  const auto given = text(name);
  if (!given) return initial;
  const auto value = number_of<int>(*given);
  MOESH_CHECK(value && *value >= least, ErrorKind::config, name, " is '", *given,
              "'; it takes a whole number, ", least, " or more");
  return *value;
}

double Arguments::real(const std::string& name, double initial) const {
  const auto given = text(name);
  if (!given) return initial;
  double value = 0;
  char rest = 0;
  MOESH_CHECK(std::sscanf(given->c_str(), "%lf%c", &value, &rest) == 1 && std::isfinite(value) &&
                  value >= 0,
              ErrorKind::config, name, " is '", *given, "'; it takes a number, 0 or more, as in ",
              name, "=1e-5");
  return value;
}

void Arguments::expect_words(std::size_t count) const {
  MOESH_CHECK(rest_.size() == count, ErrorKind::config, command_->name, " has ", rest_.size(),
              " words where ", count, count == 1 ? " is needed; " : " are needed; ", usage());
}

std::string Arguments::usage() const { return usage_of(*command_); }

std::string Command::usage() const {
  return "moesh " + name + (words.empty() ? "" : " " + words) +
         (takes_config || !options.empty() ? " [OPTIONS]" : "");
}

std::string Command::line() const { return in_columns("  " + name, kLineColumn, help); }

std::string Command::describe() const {
  std::string sentences = help + "." + (details.empty() ? "" : " " + details);
  sentences[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(sentences[0])));
  std::string text = "usage: " + usage() + "\n\n" + in_columns("", 0, sentences);
  if (!options.empty()) text += "\n";
  for (const CommandOption& o : options)
    text +=
        in_columns("  " + o.name + (o.value.empty() ? "" : " ") + o.value, kOptionColumn, o.help);
  return text;
}

const Command& find_command(const std::vector<Command>& commands, const std::string& name) {
  for (const Command& c : commands)
    if (c.name == name) return c;
  throw_no_command(commands, name);
}

CommandLine read_command_line(const std::vector<Command>& commands, const Args& all) {
  const Args args = with_dashed_values(commands, all);
  CLI::App app;
  app.allow_extras()->require_subcommand(0, 1);
  app.set_version_flag("--version", "");
  const CommandOption log_level{.name = kLogLevel, .value = "LEVEL", .help = ""};
  add(app, log_level);
  for (const Command& c : commands) {
    CLI::App* sub = app.add_subcommand(c.name)->allow_extras();
    add(*sub, log_level);
    for (const CommandOption& o : c.options) add(*sub, o);
  }
  CommandLine line;
  try {
    app.parse(Args(args.rbegin(), args.rend()));  // CLI11 takes them from the end
  } catch (const CLI::CallForHelp&) {
    line.wants_help = true;
  } catch (const CLI::CallForVersion&) {
    line.wants_version = true;
  } catch (const CLI::ParseError& e) {
    throw Error(ErrorKind::config, detail::concat(e.what(), "; moesh help lists what there is"));
  }
  const auto named = app.get_subcommands();
  // Words before a command, or that are not a command.
  if (const Args loose = app.remaining(); !loose.empty())
    throw_no_command(commands, named.empty() ? loose[0] : named[0]->get_name() + " " + loose[0]);
  if (app.count(kLogLevel) > 0) line.log_level = values_of(app, log_level).front();
  if (named.empty()) return line;
  const CLI::App& sub = *named[0];
  line.command = &find_command(commands, sub.get_name());
  if (sub.count(kLogLevel) > 0) line.log_level = values_of(sub, log_level).front();
  refuse_values(*line.command, args);
  line.given.command_ = line.command;
  for (const CommandOption& o : line.command->options)
    if (sub.count(o.name) > 0) line.given.values_[o.name] = values_of(sub, o);
  line.given.rest_ = sub.remaining();
  if (!line.command->takes_config && !line.wants_help)
    for (const std::string& arg : line.given.rest_)
      if (arg.starts_with("-") && arg.size() > 1) throw_no_option(*line.command, arg);
  return line;
}

std::int64_t parse_size(const std::string& text) {
  const std::pair<const char*, double> units[] = {{"B", 1},        {"KiB", 0x1p10}, {"MiB", 0x1p20},
                                                  {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"KB", 1e3},
                                                  {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double number = 0;
  char unit[8] = "";
  const int num_read = std::sscanf(text.c_str(), "%lf %7s", &number, unit);
  for (const auto& [name, factor] : units)
    if (num_read >= 1 && number > 0 && std::isfinite(number) && std::string(unit) == name)
      return static_cast<std::int64_t>(number * factor);
  throw Error(
      ErrorKind::config,
      "--memory is '" + text + "'; it takes a number with its unit, such as 80GiB, 80GB or 500MiB");
}

using formats::file_system;

NamedOutput::NamedOutput(std::string option, std::string path)
    : option_(std::move(option)), path_(std::move(path)) {
  // Without O_NONBLOCK, opening a pipe waits for its reader.
  descriptor_ = file_system().open(path_, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK);
  if (descriptor_ < 0) fail(errno);
  ::fcntl(descriptor_, F_SETFL, 0);  // but a reader that is slow is
}

NamedOutput::~NamedOutput() { file_system().close(descriptor_); }

void NamedOutput::write(const std::string& text) {
  for (std::size_t written = 0; written < text.size();) {
    const auto count =
        file_system().append(descriptor_, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail(count < 0 ? errno : EIO);
    written += static_cast<std::size_t>(count);
  }
}

void NamedOutput::fail(int code) const {
  try {
    formats::fail_at(path_, "write", code);
  } catch (const Error& e) {
    throw Error(e.kind() == ErrorKind::data ? ErrorKind::config : e.kind(),
                detail::concat(option_, ": ", e.what(), "; choose a file that can be written"));
  }
}

}  // namespace moesh::cli
