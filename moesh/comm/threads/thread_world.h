#pragma once
// A world whose ranks are threads of this process. Ranks read each other's memory: an exchange publishes pointers, and
// each rank copies or sums straight from its peers. Waits block on a condition, never spin.

#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moesh/comm/host_group.h"

namespace moesh::comm {

class ThreadGroupState;

/// What the ranks of one world share: who has left, and the first fault.
class ThreadWorld : public std::enable_shared_from_this<ThreadWorld> {
 public:
  static std::shared_ptr<ThreadWorld> create(int num_ranks, std::chrono::milliseconds timeout);

  /// The world group as `rank` sees it.
  std::shared_ptr<Group> group(int rank);

  /// Rank threads report their end: `fault` is what they threw, if they did. The first fault wakes every rank.
  void leave(int rank, std::exception_ptr fault);

  int num_ranks() const { return num_ranks_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  /// What the first failing rank threw, or null.
  std::exception_ptr first_fault() const;

 private:
  friend class ThreadGroupState;
  ThreadWorld(int num_ranks, std::chrono::milliseconds timeout);

  /// Why a wait for `missing` ranks cannot end well; empty while it can.
  std::string reason(const std::vector<int>& missing) const;
  std::shared_ptr<ThreadGroupState> state(const std::string& key, const std::string& name, const std::vector<int>& members);

  const int num_ranks_;
  const std::chrono::milliseconds timeout_;
  mutable std::mutex mutex_;
  std::vector<bool> left_;
  int faulty_rank_ = -1;
  std::string fault_text_;
  std::exception_ptr fault_;
  std::map<std::string, std::shared_ptr<ThreadGroupState>> states_;
};

}  // namespace moesh::comm
