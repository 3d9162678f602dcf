#pragma once
// Which threads of this process work for which rank: its own, and those that help it, such as the
// thread of a channel. (set_log_rank says so, and every one of them calls it.)

#include <cstdint>

namespace moesh {

/// From now on and until it ends this thread works for `rank`; -1: for none.
void work_for_rank(int rank);

/// By the number that the system has for a thread, or by the low 32 bits of its pthread_t, which is
/// what CUPTI has for a thread that no operator ran in; -1: unknown.
int rank_of_thread(std::int64_t number);

/// While it lives, threads that have ended are still known.
class KeepRankThreads {
 public:
  KeepRankThreads();
  ~KeepRankThreads();
  KeepRankThreads(const KeepRankThreads&) = delete;
  KeepRankThreads& operator=(const KeepRankThreads&) = delete;
};

}  // namespace moesh
