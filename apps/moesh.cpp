// The command `moesh`: thin. What it does is in moesh/cli.

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "moesh/cli/program.h"

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

// LibTorch takes memory before main, and this is called before LibTorch is.
using Call = void (*)(int, char**, char**);
[[gnu::section(".preinit_array"), gnu::used]] const Call kBeforeLibraries =
    [](int, char**, char**) { moesh::cli::end_with_sentences(); };

}  // namespace

int main(int argc, char** argv) {
  start_without_spinning(argv);
  return moesh::cli::run_program(std::vector<std::string>(argv + 1, argv + argc));
}
