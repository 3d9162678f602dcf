#pragma once
// One exception type with a kind. Every message carries the offending values and the way out.

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace moesh {

enum class ErrorKind {
  config,    // the user asked for something that cannot be
  data,      // a file or tensor from outside is not what it should be
  storage,   // a disk or file system refused; what is on it may be fine
  comm,      // a rank left, fell out of step, or did not answer in time
  device,    // an accelerator or its driver refused
  diverged,  // the numbers of a run are not finite any more
  internal,  // moesh itself is wrong
};

const char* to_string(ErrorKind kind);

/// The only exception moesh throws.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

/// How the command ends. Scripts depend on these numbers: they do not change.
enum class ExitCode {
  done = 0,
  does_not_hold = 1,  // verify, compare, inspect --check, estimate: something differs, does not fit
  usage = 2,          // an option, or a file that was named, is not what it should be
  failed = 3,         // moesh itself, or a device
  stopped = 4,    // by a signal or training.max_minutes; the step is saved where checkpoints are
  diverged = 5,   // training.max_skipped_steps in a row had no finite gradient
  lost_rank = 6,  // a rank died, hung or fell out of step
  storage = 7,    // a disk or file system refused; what is on it may be fine
};

/// The table, for --help and the pages.
constexpr const char* kExitCodes =
    "exit codes: 0 done, 1 what was checked does not hold, 2 an option or a file is not what it\n"
    "should be, 3 moesh or a device failed, 4 stopped (signal, time limit), 5 diverged, 6 a rank was\n"
    "lost, 7 storage (a disk or file system refused)\n";

/// That of a command which an Error ended.
constexpr ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::config:
    case ErrorKind::data: return ExitCode::usage;
    case ErrorKind::storage: return ExitCode::storage;
    case ErrorKind::comm: return ExitCode::lost_rank;
    case ErrorKind::diverged: return ExitCode::diverged;
    case ErrorKind::device:
    case ErrorKind::internal: return ExitCode::failed;
  }
  return ExitCode::failed;
}

namespace detail {

template <class V>
void print_value(std::ostream& os, const V& v) {
  os << v;
}

template <class V>
void print_value(std::ostream& os, const std::vector<V>& values) {
  os << '[';
  for (size_t i = 0; i < values.size(); ++i) os << (i ? ", " : "") << values[i];
  os << ']';
}

template <class... Vs>
std::string concat(const Vs&... vs) {
  std::ostringstream os;
  (print_value(os, vs), ...);
  return os.str();
}

[[noreturn]] void fail(const char* file, int line, const char* condition, ErrorKind kind,
                       const std::string& text);

template <class... Vs>
[[noreturn]] void fail_with(const char* file, int line, const char* condition, ErrorKind kind,
                            const Vs&... vs) {
  fail(file, line, condition, kind, concat(vs...));
}

template <class... Vs>
[[noreturn]] void fail_with(const char* file, int line, const char* condition, const char* text,
                            const Vs&... vs) {
  fail(file, line, condition, ErrorKind::internal, concat(text, vs...));
}

}  // namespace detail
}  // namespace moesh

/// MOESH_CHECK(x > 0, ErrorKind::config, "x is ", x, "; set it to 1 or more"). Without a kind it is
/// an internal error and the message also names file, line and condition.
#define MOESH_CHECK(cond, ...)                                            \
  do {                                                                    \
    if (!(cond)) [[unlikely]]                                             \
      ::moesh::detail::fail_with(__FILE__, __LINE__, #cond, __VA_ARGS__); \
  } while (false)
