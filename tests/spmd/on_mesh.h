#pragma once
// Ranks of a mesh, as threads.

#include <concepts>

#include "moesh/comm/mesh.h"
#include "moesh/spmd/spmd.h"
#include "tests/spmd/device.h"

namespace moesh {

/// Calls f on every rank of a mesh, with its world and the mesh, as far as it takes them.
template <typename F>
void on_mesh(const MeshShape& shape, F f, const comm::LaunchOptions& options = test_options()) {
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        if constexpr (std::invocable<F, comm::Group&, const Mesh&>)
          f(world, mesh);
        else if constexpr (std::invocable<F, const Mesh&>)
          f(mesh);
        else if constexpr (std::invocable<F, comm::Group&>)
          f(world);
        else
          f();
      },
      options);
}

}  // namespace moesh
