#include "moesh/checkpoint/workers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "moesh/comm/launch.h"

namespace moesh::checkpoint {
namespace {

constexpr int kMostWorkers = 8;
constexpr std::uint64_t kBytesPerWorker = std::uint64_t{64} << 20;

// What the threads of one call have in common.
struct Shared {
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::condition_variable changed;
  int num_running = 0;
  std::exception_ptr fault;

  void fail(std::exception_ptr reason, std::size_t num_items) {
    next = num_items;  // nobody begins another
    const std::lock_guard lock(mutex);
    if (!fault) fault = std::move(reason);
  }
};

}  // namespace

void share_work(std::size_t num_items, int num_threads,
                const std::function<void(std::size_t, std::size_t)>& f,
                const std::function<void()>& meanwhile) {
  if (num_threads == 1) {
    for (std::size_t i = 0; i < num_items; ++i) {
      if (meanwhile) meanwhile();
      f(i, 0);
    }
    return;
  }
  Shared shared;
  std::vector<std::thread> threads;
  const auto work = [&](std::size_t thread) {
    try {
      for (std::size_t i; (i = shared.next++) < num_items;) f(i, thread);
    } catch (...) {
      shared.fail(std::current_exception(), num_items);
    }
    const std::lock_guard lock(shared.mutex);
    --shared.num_running;
    shared.changed.notify_one();
  };
  for (int t = 0; t < num_threads; ++t) {
    {
      const std::lock_guard lock(shared.mutex);
      ++shared.num_running;
    }
    try {
      threads.emplace_back(work, static_cast<std::size_t>(t));
    } catch (const std::system_error&) {
      // The system has no more threads for us: those that there are do it, or else this one.
      const std::lock_guard lock(shared.mutex);
      --shared.num_running;
      break;
    }
  }
  if (threads.empty()) return share_work(num_items, 1, f, meanwhile);
  try {
    std::unique_lock lock(shared.mutex);
    while (!shared.changed.wait_for(lock, std::chrono::milliseconds(20),
                                    [&] { return shared.num_running == 0; })) {
      lock.unlock();
      if (meanwhile) meanwhile();
      lock.lock();
    }
  } catch (...) {
    shared.fail(std::current_exception(), num_items);
  }
  for (auto& t : threads) t.join();
  if (shared.fault) std::rethrow_exception(shared.fault);
}

int num_workers(std::uint64_t num_bytes) {
  const auto pieces =
      static_cast<int>(std::min<std::uint64_t>(kMostWorkers, num_bytes / kBytesPerWorker));
  return std::clamp(std::min(pieces, comm::cores_of_rank()), 1, kMostWorkers);
}

}  // namespace moesh::checkpoint
