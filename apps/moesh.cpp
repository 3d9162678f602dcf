// The command `moesh`: thin. What it does is in moesh/cli.

#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/cli/program.h"

namespace {

// An idle thread of an OpenMP team spins for milliseconds before it sleeps, and on a busy machine
// it keeps the very threads from running that it waits for (docs/performance.md, "Waiting").
// libgomp reads its setting when it is loaded: so the program starts itself once more with it. What
// the user sets counts.
void start_without_spinning(char** argv, char** environment) {
  std::vector<char*> variables;
  for (char** v = environment; *v; ++v) variables.push_back(*v);
  const auto is_setting = [](std::string_view v) {
    return v.starts_with("OMP_WAIT_POLICY=") || v.starts_with("GOMP_SPINCOUNT=");
  };
  if (std::ranges::any_of(variables, is_setting)) return;
  std::string passive = "OMP_WAIT_POLICY=passive";
  variables.push_back(passive.data());
  variables.push_back(nullptr);
  execve("/proc/self/exe", argv, variables.data());  // returns where it cannot: then threads spin
}

// Some milliseconds after the process began, before the libraries are initialized, of which
// LibTorch takes memory, and half a second on a busy machine.
void begin(int argc, char** argv, char** environment) {
  start_without_spinning(argv, environment);
  moesh::cli::begin_program(argc, argv);
}

using Call = void (*)(int, char**, char**);
[[gnu::section(".preinit_array"), gnu::used]] const Call kBeforeLibraries = begin;

}  // namespace

int main(int argc, char** argv) {
  return moesh::cli::run_program(std::vector<std::string>(argv + 1, argv + argc));
}
