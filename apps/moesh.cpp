// The command `moesh`: thin. What it does is in moesh/cli.

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "moesh/base/exit_code.h"
#include "moesh/cli/commands.h"

int main(int argc, char** argv) {
  using moesh::ExitCode;
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of the shell is an error, not a death
  int code = 0;
  try {
    code = moesh::cli::run_command(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const moesh::Error& e) {
    std::fprintf(stderr, "moesh: %s error: %s\n", to_string(e.kind()), e.what());
    code = static_cast<int>(exit_code(e.kind()));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "moesh: %s\n", e.what());
    code = static_cast<int>(ExitCode::failed);
  }
  errno = 0;
  const bool is_lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (is_lost)
    std::fprintf(stderr, "moesh: storage error: standard output could not be written%s%s\n",
                 errno ? ": " : "", errno ? std::strerror(errno) : "");
  return is_lost && code == 0 ? static_cast<int>(ExitCode::storage) : code;
}
