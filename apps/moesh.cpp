// The command `moesh`: thin. What it does is in moesh/cli.

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "moesh/base/exit_code.h"
#include "moesh/base/terminal.h"
#include "moesh/cli/commands.h"

namespace {

// An idle thread of an OpenMP team spins for milliseconds before it sleeps, and on a busy machine
// it keeps the very threads from running that it waits for (docs/performance.md, "Waiting").
// libgomp reads its setting when it is loaded, before main: so the program starts itself once more
// with it. What the user sets counts.
void start_without_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
  setenv("OMP_WAIT_POLICY", "passive", 1);
  execv("/proc/self/exe", argv);  // returns where it cannot: then threads spin
}

}  // namespace

int main(int argc, char** argv) {
  start_without_spinning(argv);
  using moesh::ExitCode;
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of the shell is an error, not a death
  int code = 0;
  try {
    code = moesh::cli::run_command(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const moesh::Error& e) {
    std::fprintf(stderr, "moesh: %s error: %s\n", to_string(e.kind()),
                 moesh::for_terminal(e.what()).c_str());
    code = static_cast<int>(exit_code(e.kind()));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "moesh: %s\n", moesh::for_terminal(e.what()).c_str());
    code = static_cast<int>(ExitCode::failed);
  }
  errno = 0;
  const bool is_lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (is_lost)
    std::fprintf(stderr, "moesh: storage error: standard output could not be written%s%s\n",
                 errno ? ": " : "", errno ? std::strerror(errno) : "");
  return is_lost && code == 0 ? static_cast<int>(ExitCode::storage) : code;
}
