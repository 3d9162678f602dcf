#include "moesh/base/log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "moesh/base/terminal.h"

namespace moesh {
namespace {

constexpr const char* kNames[] = {"debug", "info", "warn", "error", "off"};

LogLevel level_from_environment() {
  const char* text = std::getenv("MOESH_LOG");
  if (!text) return LogLevel::info;
  for (int i = 0; i < 5; ++i)
    if (std::strcmp(text, kNames[i]) == 0) return static_cast<LogLevel>(i);
  std::fprintf(stderr,
               "[warn] MOESH_LOG is '%s'; it takes debug, info, warn, error or off. Using info.\n",
               text);
  return LogLevel::info;
}

std::atomic<LogLevel>& current_level() {
  static std::atomic<LogLevel> level{level_from_environment()};
  return level;
}

std::atomic<LogSink> current_sink{nullptr};
thread_local int current_rank = -1;

}  // namespace

void set_log_rank(int rank) { current_rank = rank; }
int log_rank() { return current_rank; }
void set_log_level(LogLevel level) { current_level() = level; }
LogLevel log_level() { return current_level(); }
void set_log_sink(LogSink sink) { current_sink = sink; }

void log_line(LogLevel level, const std::string& text) {
  const char* name = kNames[static_cast<int>(level)];
  const std::string line = current_rank < 0
                               ? detail::concat("[", name, "] ", text)
                               : detail::concat("[", name, " rank ", current_rank, "] ", text);
  if (LogSink sink = current_sink) return sink(level, line);
  const std::string with_end = for_terminal(line) + '\n';
  std::fwrite(with_end.data(), 1, with_end.size(), stderr);
}

}  // namespace moesh
