#pragma once
// A kernel that computes nothing for some time.

#include <cstdint>

namespace moesh::comm::cuda {

/// Queues it on a stream of the current device: one block, which sleeps. Null, or why it was not
/// queued.
const char* sleep(void* stream, std::int64_t nanoseconds);

}  // namespace moesh::comm::cuda
