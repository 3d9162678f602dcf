#pragma once
// Groups of GPUs, through NCCL: one rank per GPU, collectives on a stream of their own. `wait`
// orders streams and does not block the host, so a failure shows at the next call of any group of
// the world, not in the value. Sums are NCCL's: the same bits on every rank, but not those of
// threads and mpi, and where a maximum or minimum meets NaN, NCCL decides.

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "moesh/comm/group.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/nccl/api.h"

namespace moesh::comm {

struct NcclOptions {
  std::chrono::milliseconds timeout{
      300'000};  // of every operation, and of the start and the end of a group
  bool block_host =
      false;  // `wait` also blocks the host, and so throws what went wrong in that very operation;
              // and what is sent is compared with what is expected, before each message
  std::shared_ptr<const NcclApi> api;  // empty: the installed library

  void validate() const;
};

/// The ranks of `bootstrap` as an NCCL world. Every rank of it calls this, with its own GPU.
std::shared_ptr<Group> nccl_world(Group& bootstrap, at::Device device,
                                  const NcclOptions& options = {});

/// Ranks of `group` that are on the same GPU as a lower one; every rank calls it and gets the same
/// list. Empty: NCCL will do, since there are none or since NCCL of all ranks `may_share`.
std::vector<int> ranks_that_share_a_gpu(Group& group, at::Device device, bool may_share);

/// Ends the world of an NCCL group in good order: every rank calls it, and waits for the others.
/// When the last group of a world is dropped, this happens by itself.
void close_nccl(Group& group);

/// Ends the world of an NCCL group on this rank: what is in progress is aborted, and every later
/// call throws `reason`. Any thread may call it.
void stop_nccl(Group& group, const std::string& reason);

// Turns the world of a launch (threads or processes) into an NCCL world before the program sees it.

/// Sets what CUDA reads when it begins (what the user set stays). Streams have hardware queues of
/// their own, since streams in one queue wait for each other. In a process with others beside it
/// all kernels are loaded at once, since one that is loaded later waits for those on the GPU, which
/// may wait for another rank.
void prepare_cuda();

/// Whether a launch should try: backend nccl, or automatic under mpirun or srun with a CUDA device,
/// one rank a process and NCCL at hand.
bool should_try_nccl(int num_ranks, const LaunchOptions& options);

/// Run by each rank of the host world: it takes its GPU, and calls `f` with the NCCL world over
/// all ranks. With backend automatic, and several ranks on one GPU, `f` gets the host world. A rank
/// that throws stops those of its own process. An empty `api` is the installed library.
std::function<void(Group& host)> on_nccl(std::function<void(Group& world)> f, LaunchOptions options,
                                         std::shared_ptr<const NcclApi> api = {});

}  // namespace moesh::comm
