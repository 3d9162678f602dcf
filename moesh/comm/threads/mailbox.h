#pragma once
// Messages between ranks that are threads. Nothing is kept in between: when both ends have come,
// whoever came last copies from the tensor of the sender into that of the receiver. So a message
// arrives while the rank that waits for it, or for another one, does nothing.

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moesh/comm/host_group.h"

namespace moesh::comm {

class ThreadWorld;

/// A peer is often only a few microseconds behind, and to block and be woken costs more than that.
constexpr int kYieldsBeforeBlocking = 50;

/// The messages of one group that are on their way. Channels are of ranks of the group.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  Mailbox(std::weak_ptr<ThreadWorld> world, std::string group, std::vector<int> members)
      : world_(std::move(world)), group_(std::move(group)), members_(std::move(members)) {}

  /// One end of a message comes, as `call` says. x is what is sent, or where it goes.
  std::unique_ptr<Work> bring(const Channel& channel, const Call& call, const at::Tensor& x);

  /// A rank has left the world: who waits for it looks again.
  void wake();

 private:
  friend class LetterWork;
  struct Letter;

  void deliver(Letter& letter);
  void wait(const Letter& letter, int rank, const Call& call);

  const std::weak_ptr<ThreadWorld> world_;
  const std::string group_;
  const std::vector<int> members_;  // world ranks
  std::mutex mutex_;
  std::condition_variable changed_;
  // Of which one end has come, and so all ends of a channel are of one kind.
  std::map<Channel, std::deque<std::shared_ptr<Letter>>> waiting_;
};

}  // namespace moesh::comm
