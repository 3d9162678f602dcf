#pragma once
// One pool of tasks of unequal size.

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

namespace moesh::kernels::cpu {

/// How many workers run_tasks uses for so many tasks.
inline std::int64_t num_workers(std::int64_t num_tasks) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(num_tasks, at::in_parallel_region() ? 1 : at::get_num_threads()));
}

/// Calls f(task, worker) for every task, on the ATen threads of the calling thread; a worker takes the next task when it is
/// done with one. Tasks write disjoint memory, so results do not depend on who runs what.
template <class F>
void run_tasks(std::int64_t num_tasks, const F& f) {
  if (num_tasks == 0) return;
  std::atomic<std::int64_t> next{0};
  at::parallel_for(0, num_workers(num_tasks), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) f(task, worker);
    }
  });
}

}  // namespace moesh::kernels::cpu
