#pragma once
// How the command ends. Scripts depend on these numbers: they do not change.

#include "moesh/base/error.h"

namespace moesh {

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

}  // namespace moesh
