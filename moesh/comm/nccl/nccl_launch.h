#pragma once
// Turns the world of a launch (threads or processes) into an NCCL world before the program sees it.

#include <functional>

#include "moesh/comm/launch.h"
#include "moesh/comm/nccl/api.h"

namespace moesh::comm {

/// Whether a launch should try: backend nccl, or automatic under mpirun or srun with a CUDA device,
/// one rank a process and NCCL at hand.
bool should_try_nccl(int num_ranks, const LaunchOptions& options);

/// What each rank of the host world runs: it takes its GPU, and calls `f` with the NCCL world over
/// all ranks. With backend automatic, and several ranks on one GPU, `f` gets the host world. A rank
/// that throws stops those of its own process. An empty `api` is the installed library.
std::function<void(Group& host)> on_nccl(std::function<void(Group& world)> f, LaunchOptions options,
                                         std::shared_ptr<const NcclApi> api = {});

}  // namespace moesh::comm
