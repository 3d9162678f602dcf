#include "moesh/base/this_thread.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <vector>

namespace moesh {
namespace {

struct Thread {
  std::int64_t system = 0, posix = 0;
  RankLane works_for;
  bool has_ended = false;
};

struct ThreadTable {
  std::mutex mutex;
  std::vector<Thread> threads;  // the system gives a number again: a later one is meant
  int num_keepers = 0;

  void forget_ended() {
    std::erase_if(threads, [](const Thread& t) { return t.has_ended; });
  }
};

ThreadTable& table() {
  static ThreadTable* const all = new ThreadTable;  // threads may end after everything static has
  return *all;
}

std::int64_t system_number() { return ::syscall(SYS_gettid); }

// Its last moment is that of the thread.
struct Registered {
  bool is_known = false;
  ~Registered() {
    if (!is_known) return;
    ThreadTable& all = table();
    const std::lock_guard lock(all.mutex);
    for (Thread& t : all.threads)
      if (t.system == system_number()) t.has_ended = true;
    if (all.num_keepers == 0) all.forget_ended();
  }
};
thread_local Registered registered;

}  // namespace

void work_for_rank(int rank, int lane) {
  ThreadTable& all = table();
  const std::lock_guard lock(all.mutex);
  const std::int64_t system = system_number();
  for (Thread& t : all.threads)
    if (t.system == system && !t.has_ended) {
      t.works_for = {rank, lane};
      return;
    }
  all.threads.push_back(
      {.system = system,
       .posix = static_cast<std::int32_t>(reinterpret_cast<std::uintptr_t>(pthread_self())),
       .works_for = {rank, lane}});
  registered.is_known = true;
}

RankLane rank_of_thread(std::int64_t number) {
  ThreadTable& all = table();
  const std::lock_guard lock(all.mutex);
  for (auto t = all.threads.rbegin(); t != all.threads.rend(); ++t)
    if (t->system == number) return t->works_for;
  for (auto t = all.threads.rbegin(); t != all.threads.rend(); ++t)
    if (t->posix == static_cast<std::int32_t>(number)) return t->works_for;
  return {};
}

KeepRankThreads::KeepRankThreads() {
  const std::lock_guard lock(table().mutex);
  ++table().num_keepers;
}

KeepRankThreads::~KeepRankThreads() {
  const std::lock_guard lock(table().mutex);
  if (--table().num_keepers == 0) table().forget_ended();
}

}  // namespace moesh
