#pragma once
// The command line: which command, and what it is given. CLI11 reads the commands and their own
// options; the options of a configuration, whose keys depend on the model, go through unread.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace moesh::cli {

using Args = std::vector<std::string>;

/// An option of a command that is not part of the configuration.
struct CommandOption {
  std::string name;   // "--json"
  std::string value;  // "FILE"; "[FILE]": with or without one; empty: without
  std::string help;
  bool may_repeat = false;
};

struct Command;
struct CommandLine;
/// The arguments of a command.
class Arguments {
 public:
  /// The value of an option; nothing where it is not there. An option without a value has an empty
  /// one.
  std::optional<std::string> text(const std::string& name) const;
  /// All values, of an option that may repeat.
  Args texts(const std::string& name) const;
  /// A whole number, `least` or more; `initial` where it is not given.
  int number(const std::string& name, int initial, int least = 1) const;
  /// A number, 0 or more.
  double real(const std::string& name, double initial) const;
  bool has(const std::string& name) const { return values_.contains(name); }

  /// The rest: the options of the configuration, or the words of a command that takes none.
  const Args& rest() const { return rest_; }
  /// Throws Error (config) unless they are `count` words.
  void expect_words(std::size_t count) const;
  /// How the command is called, and where its options are listed: for messages.
  std::string usage() const;

 private:
  friend CommandLine read_command_line(const std::vector<Command>&, const Args&);
  const Command* command_ = nullptr;
  std::map<std::string, Args> values_;
  Args rest_;
};

struct Command {
  std::string name;
  std::string words;          // that follow it: "A B"
  std::string help;           // one line: what it does
  bool takes_config = false;  // the options of a configuration
  std::vector<CommandOption> options;
  int (*run)(const Arguments& given);
  std::string details = "";  // further sentences for its own help

  /// "moesh compare A B [OPTIONS]"
  std::string usage() const;
  /// Its line in the list of commands.
  std::string line() const;
  /// Its own help: usage, sentences and its own options, in lines of at most 100 columns.
  std::string describe() const;
};

struct CommandLine {
  const Command* command = nullptr;  // null: none is named
  Arguments given;
  bool wants_help = false, wants_version = false;
  std::optional<std::string> log_level;
};

/// Throws Error (config) where no command is called so.
const Command& find_command(const std::vector<Command>& commands, const std::string& name);

/// Throws Error (config) where no command is called so, an option has no value, is there twice, or
/// is not an option of a command without a configuration.
CommandLine read_command_line(const std::vector<Command>& commands, const Args& args);

/// "80GiB", "80 GB", "500MiB" of --memory. A number without a unit is refused: a user who writes 80
/// does not mean bytes.
std::int64_t parse_size(const std::string& text);

// A file that an option names for a result: --out, --json.

/// Opened before the work whose result it gets. Does not wait for a pipe without a reader. Errors
/// name the option: of kind config where the path cannot be a file, storage where the disk refuses.
class NamedOutput {
 public:
  NamedOutput(std::string option, std::string path);
  ~NamedOutput();
  NamedOutput(const NamedOutput&) = delete;
  NamedOutput& operator=(const NamedOutput&) = delete;

  void write(const std::string& text);

 private:
  [[noreturn]] void fail(int code) const;

  std::string option_, path_;
  int descriptor_;
};

}  // namespace moesh::cli
