// The conformance suite as a program, for backends that need a launcher:
//   [mpirun -n 4] comm_conformance_main [--ranks 8] [--checked] [--cuda | --nccl] [--digest]
// Without a launcher the ranks are threads. --cuda: all on one GPU; --nccl: a GPU each. --digest
// prints a hash of many results instead: equal hashes mean equal bits.

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "conformance.h"
#include "moesh/comm/launch.h"

using namespace moesh::comm;

int main(int argc, char** argv) {
  int num_ranks = 0;
  bool digest = false;
  LaunchOptions options{.timeout = std::chrono::seconds(60)};
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0 && i + 1 < argc) num_ranks = std::atoi(argv[++i]);
    if (std::strcmp(argv[i], "--checked") == 0) options.checked = true;
    if (std::strcmp(argv[i], "--cuda") == 0)
      options.device = at::Device(at::kCUDA, 0), options.backend = Backend::host;
    if (std::strcmp(argv[i], "--nccl") == 0)
      options.device = at::kCUDA, options.backend = Backend::nccl;
    if (std::strcmp(argv[i], "--digest") == 0) digest = true;
  }
  const bool is_nccl = options.backend == Backend::nccl;
  if (digest) {
    launch(
        num_ranks,
        [&](Group& world) {
          const auto value = conformance::digest(world, {.device = options.device}, 42);
          if (world.rank() == 0)
            std::printf("digest of %d ranks: %016" PRIx64 "\n", world.size(), value);
        },
        options);
    return 0;
  }
  for (const auto& c : conformance::cases()) {
    try {
      launch(
          num_ranks,
          [&](Group& world) {
            c.run(world, {.device = is_nccl ? world.control_device() : options.device,
                          .exact_sums = !is_nccl,
                          .nan_wins = !is_nccl,
                          .checked = options.checked,
                          .any_order = !options.checked && !is_nccl});
            if (world.rank() == 0) std::printf("%s holds on %d ranks\n", c.name, world.size());
          },
          options);
    } catch (const std::exception& e) {
      std::printf("%s FAILED: %s\n", c.name, e.what());
      std::fflush(stdout);
      return 1;
    }
  }
  return 0;
}
