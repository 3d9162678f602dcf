// The command `moesh`: thin. What it does is in moesh/cli.

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/cli/commands.h"

int main(int argc, char** argv) {
  try {
    return moesh::cli::run_command(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const moesh::Error& e) {
    std::fprintf(stderr, "moesh: %s error: %s\n", to_string(e.kind()), e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "moesh: %s\n", e.what());
    return 3;
  }
}
