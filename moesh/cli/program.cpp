#include "moesh/cli/program.h"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>

#include "moesh/base/exit_code.h"
#include "moesh/base/terminal.h"
#include "moesh/cli/commands.h"

namespace moesh::cli {

int run_program(const std::vector<std::string>& args) {
  std::signal(SIGXFSZ, SIG_IGN);  // a file over the limit of the shell is an error, not a death
  int code = 0;
  try {
    code = run_command(args);
  } catch (const Error& e) {
    std::fprintf(stderr, "moesh: %s error: %s\n", to_string(e.kind()),
                 for_terminal(e.what()).c_str());
    code = static_cast<int>(exit_code(e.kind()));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "moesh: %s\n", for_terminal(e.what()).c_str());
    code = static_cast<int>(ExitCode::failed);
  }
  errno = 0;
  const bool is_lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (is_lost)
    std::fprintf(stderr, "moesh: storage error: standard output could not be written%s%s\n",
                 errno ? ": " : "", errno ? std::strerror(errno) : "");
  return is_lost && code == 0 ? static_cast<int>(ExitCode::storage) : code;
}

}  // namespace moesh::cli
