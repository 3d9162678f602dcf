#pragma once
// A log line carries its rank. One line is one write, so that lines of several ranks never
// interleave.

#include <optional>
#include <string>
#include <string_view>

#include "moesh/base/error.h"

namespace moesh {

enum class LogLevel { debug, info, warn, error, off };

/// The rank of this thread, which its log lines show; -1: none is shown.
void set_log_rank(int rank);
int log_rank();

/// Lines below this level are dropped. Initially from the environment variable MOESH_LOG (debug,
/// info, warn, error, off), else info.
void set_log_level(LogLevel level);
LogLevel log_level();
/// Takes "debug", "info", "warn", "error" or "off"; nullopt for any other text.
std::optional<LogLevel> parse_log_level(std::string_view text);

/// Replaces the sink (standard error) of every line; an empty function restores it. For tests and
/// embedding programs.
using LogSink = void (*)(LogLevel, const std::string& line);
void set_log_sink(LogSink sink);

/// Called before each line on standard error, for code that has something on the terminal that must
/// go first; null: nothing is.
void set_before_log(void (*f)());

void log_line(LogLevel level, const std::string& text);

template <class... Vs>
void log(LogLevel level, const Vs&... vs) {
  if (level >= log_level()) log_line(level, detail::concat(vs...));
}

template <class... Vs>
void log_info(const Vs&... vs) {
  log(LogLevel::info, vs...);
}
template <class... Vs>
void log_warn(const Vs&... vs) {
  log(LogLevel::warn, vs...);
}

}  // namespace moesh
