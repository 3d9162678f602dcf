// Two ranks, each with its own term of a sum: all_reduce gives both the whole.
#include <ATen/ops/full.h>

#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/spmd/spmd.h"

using namespace moesh;
using enum Place;

int main() try {
  comm::launch(2, [](comm::Group& world) {
    const Mesh mesh(world, {.tp = 2});
    const MeshScope scope(mesh);
    const auto term = assume<Dense{R, R, P}>(at::full({}, 1.0 + world.rank(), at::kDouble));
    const double sum = number(all_reduce<tp>(term));
    MOESH_CHECK(sum == 3, "the sum of 1 and 2 over two ranks is ", sum);
  });
  std::puts("the installed moesh sums over two ranks");
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
