#pragma once
// One pool of tasks of unequal size, on the ATen threads of the calling thread.

#include <ATen/Parallel.h>
#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <atomic>

namespace moesh::kernels::cpu {

/// How many workers run_tasks uses for this many tasks.
inline std::int64_t num_workers(std::int64_t num_tasks) {
  return std::max<std::int64_t>(
      1, std::min<std::int64_t>(num_tasks, at::in_parallel_region() ? 1 : at::get_num_threads()));
}

/// Calls f(worker) once for each worker, on the threads that ATen gives; returns when
/// all are done. The first exception comes back. (at::parallel_for is a template whose OpenMP
/// pragma must be compiled by the caller: without -fopenmp it is silently serial, and with it a
/// second OpenMP runtime beside that of the library may come in.)
void on_workers(std::int64_t num_workers, c10::function_ref<void(std::int64_t)> f);

/// Calls f(task, worker) for every task, on `workers` workers at most; a worker takes the next task
/// when it is done with one. Tasks write disjoint memory, so results do not depend on which thread
/// runs what.
template <class F>
void run_tasks(std::int64_t num_tasks, std::int64_t workers, const F& f) {
  std::atomic<std::int64_t> next{0};
  on_workers(std::min(workers, num_tasks), [&](std::int64_t worker) {
    for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;)
      f(task, worker);
  });
}
template <class F>
void run_tasks(std::int64_t num_tasks, const F& f) {
  run_tasks(num_tasks, num_workers(num_tasks), f);
}

/// Calls f(begin, end) for ranges of [0, size) of at most `grain`.
template <class F>
void run_ranges(std::int64_t size, std::int64_t grain, const F& f) {
  run_tasks((size + grain - 1) / grain, [&](std::int64_t task, std::int64_t) {
    f(task * grain, std::min(size, (task + 1) * grain));
  });
}

}  // namespace moesh::kernels::cpu
