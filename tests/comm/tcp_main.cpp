// A process of a world that torchrun or srun has started, on the CPU (torchrun_test.py):
//   comm_tcp_main conformance   the suite of all backends
//   comm_tcp_main wait N        meets the others, says so, and waits for rank N, which never comes

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

#include "conformance.h"
#include "moesh/comm/tcp/tcp_world.h"

using namespace moesh::comm;
using namespace std::chrono_literals;

int main(int, char** argv) {
  const LaunchOptions options{.timeout = 60s};
  try {
    const Launcher launcher = find_launcher();
    if (std::strcmp(argv[1], "wait") == 0)
      launch_tcp(
          launcher, 0,
          [&](Group& world) {
            world.barrier();
            std::printf("rank %d has met the others\n", world.rank());
            std::fflush(stdout);
            if (world.rank() == std::atoi(argv[2])) std::this_thread::sleep_for(100s);
            world.barrier();
          },
          options);
    for (const auto& c : conformance::cases()) {
      if (std::strcmp(argv[1], "conformance") != 0) break;
      launch_tcp(launcher, 0, [&](Group& world) { c.run(world, {.any_order = true}); }, options);
      if (launcher.rank == 0) std::printf("%s holds\n", c.name);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
