#pragma once
// A world of MPI processes, each with one or more rank threads. no_mpi.cpp stands in where moesh
// was built without MPI.

#include <functional>

#include "moesh/comm/launch.h"

namespace moesh::comm {

/// False where moesh was built without MPI.
bool has_mpi();

/// Runs f on those of num_ranks ranks that belong to this process (0: one a process). The same call
/// is made by every process.
void launch_mpi(int num_ranks, const std::function<void(Group& world)>& f,
                const LaunchOptions& options);

}  // namespace moesh::comm
