#pragma once
// A table in place of NCCL, whose ranks are threads of this process that share one device, or the
// CPU. It keeps NCCL's rules: ids, nonblocking communicators, order on a stream, groups of sends
// and receives; and it refuses what NCCL forbids.

#include <atomic>
#include <memory>

#include "moesh/comm/nccl/api.h"

namespace moesh::comm::loopback {

/// How a call ends. NCCL does both.
enum class Pace {
  queued,  // it returns at once and runs in the order of the stream: the watchdog sees what is late
           // (CPU only)
  polled,  // it answers in_progress until it has run: the caller sees what is late
};

/// What became of the communicators.
struct Count {
  std::atomic<int> created = 0, destroyed = 0, aborted = 0;
};

struct Loopback {
  std::shared_ptr<const NcclApi> api;
  std::shared_ptr<Count> count;
};

Loopback make(at::DeviceType device, Pace pace);

/// A stream of the CPU: a thread, beside the calling one, which waits by blocking.
std::unique_ptr<CommStream> host_stream();

}  // namespace moesh::comm::loopback
