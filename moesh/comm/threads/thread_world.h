#pragma once
// A world whose ranks are threads of this process. Ranks read each other's memory: an exchange
// publishes pointers, and each rank copies or sums straight from its peers. A wait offers its core
// to the other threads a few times and then blocks. On a device a rank reads on a queue of its own,
// beside what it computes: the host waits until its peers have come, and not for the device.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moesh/comm/rank_status.h"
#include "moesh/comm/stream.h"

namespace moesh::comm {

class ThreadGroupState;

/// The queue on which a rank reads what others have on a device; null: it reads at once.
using MakeReadQueue = std::function<std::unique_ptr<CommStream>(at::Device device)>;
std::unique_ptr<CommStream> queue_off_the_host(at::Device device);

/// Shared by the ranks of one world.
class ThreadWorld : public std::enable_shared_from_this<ThreadWorld> {
 public:
  static std::shared_ptr<ThreadWorld> create(int num_ranks, std::chrono::milliseconds timeout,
                                             MakeReadQueue make_queue = queue_off_the_host);

  /// The world group as `rank` sees it.
  std::shared_ptr<Group> group(int rank);

  /// Rank threads report their end: `fault` is what they threw, if they did. The first fault wakes
  /// every rank.
  void leave(int rank, std::exception_ptr fault);

  std::chrono::milliseconds timeout() const { return timeout_; }
  const RankStatus& roll() const { return roll_; }

  /// The state that the ranks of one group share; `key` tells it from the others of this world.
  std::shared_ptr<ThreadGroupState> state(const std::string& key, const std::string& name,
                                          const std::vector<int>& members);

 private:
  ThreadWorld(int num_ranks, std::chrono::milliseconds timeout, MakeReadQueue make_queue);

  const int num_ranks_;
  const std::chrono::milliseconds timeout_;
  const MakeReadQueue make_queue_;
  RankStatus roll_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ThreadGroupState>> states_;
};

}  // namespace moesh::comm
