// The command `moesh`: thin. What it does is in moesh/cli.

#include <unistd.h>

#include <string>
#include <string_view>
#include <vector>

#include "moesh/cli/program.h"

namespace {

// An idle thread of an OpenMP team spins for milliseconds before it sleeps, and on a busy machine
// it keeps the very threads from running that it waits for (docs/performance.md, "Waiting").
// libgomp reads its setting when it is loaded, before main: so the program starts itself once more
// with it. What the user sets counts.
void start_without_spinning(char** argv, char** variables) {
  std::vector<char*> more;
  for (; *variables; ++variables) {
    const std::string_view text = *variables;
    if (text.starts_with("OMP_WAIT_POLICY=") || text.starts_with("GOMP_SPINCOUNT=")) return;
    more.push_back(*variables);
  }
  char passive[] = "OMP_WAIT_POLICY=passive";
  more.insert(more.end(), {passive, nullptr});
  execve("/proc/self/exe", argv, more.data());  // returns where it cannot: then threads spin
}

// Before the initialisers of LibTorch, which take memory, and a tenth of a second.
using Call = void (*)(int, char**, char**);
[[gnu::section(".preinit_array"), gnu::used]] const Call kBeforeLibraries = [](int, char** argv,
                                                                               char** variables) {
  moesh::cli::end_with_sentences();
  start_without_spinning(argv, variables);
};

}  // namespace

int main(int argc, char** argv) {
  return moesh::cli::run_program(std::vector<std::string>(argv + 1, argv + argc));
}
