#include "moesh/base/log.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "moesh/base/text.h"
#include "moesh/base/this_thread.h"

namespace moesh {
namespace {

constexpr const char* kNames[] = {"debug", "info", "warn", "error", "off"};

LogLevel level_from_environment() {
  const char* text = std::getenv("MOESH_LOG");
  if (!text) return LogLevel::info;
  if (const auto level = parse_log_level(text)) return *level;
  std::fprintf(stderr,
               "[warn] MOESH_LOG is '%s'; it takes debug, info, warn, error or off. Using info.\n",
               printable(text).c_str());
  return LogLevel::info;
}

std::atomic<LogLevel>& current_level() {
  static std::atomic<LogLevel> level{level_from_environment()};
  return level;
}

std::atomic<LogSink> current_sink{nullptr};
std::atomic<void (*)()> before_log{nullptr};

}  // namespace

std::optional<LogLevel> parse_log_level(std::string_view text) {
  for (int i = 0; i < 5; ++i)
    if (text == kNames[i]) return static_cast<LogLevel>(i);
  return std::nullopt;
}

void set_log_rank(int rank) {
  this_thread.rank = rank;
  work_for_rank(rank);
}
int log_rank() { return this_thread.rank; }
void set_log_level(LogLevel level) { current_level() = level; }
LogLevel log_level() { return current_level(); }
void set_log_sink(LogSink sink) { current_sink = sink; }
void set_before_log(void (*f)()) { before_log = f; }

void log_line(LogLevel level, const std::string& text) {
  const char* name = kNames[static_cast<int>(level)];
  const std::string line = this_thread.rank < 0
                               ? detail::concat("[", name, "] ", text)
                               : detail::concat("[", name, " rank ", this_thread.rank, "] ", text);
  if (LogSink sink = current_sink) return sink(level, line);
  if (const auto f = before_log.load()) f();
  const std::string with_end = printable(line) + '\n';
  std::fwrite(with_end.data(), 1, with_end.size(), stderr);
}

}  // namespace moesh
