#pragma once
// The functions of NCCL that moesh calls, as a table of functions with types of its own. No header
// of NCCL or CUDA is needed, so this compiles everywhere, and a table that is not NCCL (threads
// that share one device) can run the same tests.

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "moesh/comm/stream.h"

namespace moesh::comm {

// The values are those of nccl.h, where they have been the same since NCCL 2.10.
enum class NcclResult : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};
enum class NcclType : int {
  uint8 = 1,
  int32 = 2,
  int64 = 4,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9
};
enum class NcclReduce : int { sum = 0, max = 2, min = 3 };

/// Made by one rank, passed to all: ranks that hold the same one meet in the same communicator.
struct NcclUniqueId {
  char bytes[128];
};

struct NcclCommunicator;  // only NCCL looks inside
using NcclComm = NcclCommunicator*;

/// Communicators are nonblocking: a call may answer in_progress, and no other call may be made on
/// that communicator until get_async_error answers something else. This is what lets a deadline end
/// a call whose peers never come.
struct NcclApi {
  at::DeviceType device_type = at::kCUDA;
  bool ranks_may_share_device = false;
  std::function<std::unique_ptr<CommStream>(at::Device)> make_stream = device_stream;

  std::function<NcclResult(NcclUniqueId*)> get_unique_id;
  std::function<NcclResult(NcclComm*, int num_ranks, NcclUniqueId, int rank)> comm_init_rank;
  std::function<NcclResult(NcclComm)> comm_finalize, comm_destroy, comm_abort;
  std::function<NcclResult(NcclComm, NcclResult*)> get_async_error;

  // The count is in elements: of the input, and for reduce_scatter of the output.
  std::function<NcclResult(const void*, void*, std::size_t, NcclType, NcclReduce, NcclComm,
                           void* stream)>
      all_reduce;
  std::function<NcclResult(const void*, void*, std::size_t, NcclType, NcclComm, void* stream)>
      all_gather;
  std::function<NcclResult(const void*, void*, std::size_t, NcclType, NcclReduce, NcclComm,
                           void* stream)>
      reduce_scatter;
  std::function<NcclResult(const void*, void*, std::size_t, NcclType, int root, NcclComm,
                           void* stream)>
      broadcast;
  std::function<NcclResult(const void*, std::size_t, NcclType, int peer, NcclComm, void* stream)>
      send;
  std::function<NcclResult(void*, std::size_t, NcclType, int peer, NcclComm, void* stream)> recv;
  std::function<NcclResult()> group_start, group_end;

  std::function<const char*(NcclResult)> error_string;
  std::function<const char*(NcclComm)> last_error;
};

/// NCCL wants one rank per GPU, except from 2.30 on, if NCCL_MULTI_RANK_GPU_ENABLE=1 asks for it.
bool takes_ranks_that_share_a_gpu(int nccl_version);

/// The table of a libnccl.so.2 (2.14 or later) at `path`. It stays loaded.
std::shared_ptr<const NcclApi> load_nccl(const std::string& path);

/// The table of the installed library: the one that LibTorch has loaded, else the one that the
/// loader finds by name, else the one in the folder nvidia/nccl beside torch. Throws Error
/// (config), with the places, if there is none.
std::shared_ptr<const NcclApi> installed_nccl();

/// False without libnccl.so.2.
bool has_nccl();

}  // namespace moesh::comm
