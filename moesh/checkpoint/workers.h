#pragma once
// Work on files that several threads of a rank share: one thread hashes, or waits for the disk,
// while another writes.

#include <cstddef>
#include <cstdint>
#include <functional>

namespace moesh::checkpoint {

/// f(item, thread) once for each item below `num_items`, by `num_threads` threads, each of which
/// takes the next item when it has done one; `thread` counts them. Returns when all is done. What f
/// throws first is thrown here, and no other item is begun. Meanwhile the calling thread calls
/// `meanwhile` every few milliseconds; with one thread, it does the work itself, and calls it
/// between two items.
void share_work(std::size_t num_items, int num_threads,
                const std::function<void(std::size_t item, std::size_t thread)>& f,
                const std::function<void()>& meanwhile = {});

/// Threads of a rank for so much work: its share of the machine's cores, up to eight (which keep a
/// fast disk busy), and one for what is done at once.
int num_workers(std::uint64_t num_bytes);

}  // namespace moesh::checkpoint
