#pragma once
// What NCCL groups of a process share: the thread that starts their calls, and communicators.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "moesh/comm/host_group.h"
#include "moesh/comm/nccl/api.h"
#include "moesh/comm/observers.h"

namespace moesh::comm {

// Shared by the NCCL groups of one rank: the communicators, the stream they run on, and the
// watchdog that ends what is late.

class NcclChannel;

/// A group as messages name it.
struct NcclGroupInfo {
  std::string name;
  std::vector<int> members;  // world ranks
};

/// A collective or one end of a message, in progress.
struct NcclTicket {
  NcclComm comm = nullptr;
  Call call;
  std::shared_ptr<const NcclGroupInfo> group;
  std::vector<at::Tensor> keep;  // the memory that NCCL reads and writes
  std::shared_ptr<Mark> mark;    // its end; empty until NCCL has taken the call
  std::chrono::steady_clock::time_point called = std::chrono::steady_clock::now();
  // Since when it is waited for. A collective: since its call. A message may be started long before
  // its peer has anything to send: since the rank came to wait.
  std::optional<std::chrono::steady_clock::time_point> since;
  std::shared_ptr<const NcclTicket> message;  // of a header: what it goes before
};

/// One rank's side of a world. All collectives run on one stream, in the order of the calls: two
/// communicators on two streams of one GPU can wait for each other for ever (NcclChannel says why
/// messages do not). The first fault (a late operation, an error of NCCL, `stop`) aborts all
/// communicators, and every later call throws its text.
class NcclWorld {
 public:
  using Clock = std::chrono::steady_clock;
  /// Makes the calls of one collective on a stream.
  using Issue = std::function<NcclResult(const NcclApi& api, NcclComm comm, void* stream)>;

  NcclWorld(std::shared_ptr<const NcclApi> api, at::Device device, int rank,
            std::chrono::milliseconds timeout, bool block_host);
  /// Closes, unless an exception is on its way: then it stops.
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  at::Device device() const { return device_; }
  int rank() const { return rank_; }
  bool blocks_host() const { return block_host_; }

  NcclUniqueId new_id();
  /// A new communicator; returns when all members of the group have come. `rank` is the place among
  /// them. It lives as long as the world.
  NcclComm join(const NcclUniqueId& id, int rank, std::shared_ptr<const NcclGroupInfo> group);

  /// Queues a collective behind what the current stream holds, and `after` behind it.
  std::shared_ptr<NcclTicket> enqueue(NcclComm comm, const Call& call,
                                      std::shared_ptr<const NcclGroupInfo> group,
                                      std::vector<at::Tensor> keep, const Issue& issue,
                                      const std::function<void()>& after = {});
  /// For messages over a communicator of two ranks. It lives as long as the world.
  NcclChannel& new_channel(NcclComm comm, std::shared_ptr<const NcclGroupInfo> ends);
  /// `enqueue` in parts, for the stream of a channel: the ticket is in progress from its
  /// making, and another thread makes the calls.
  std::unique_ptr<CommStream> new_stream() const { return api_->make_stream(device_); }
  std::shared_ptr<NcclTicket> new_ticket(NcclComm comm, const Call& call,
                                         std::shared_ptr<const NcclGroupInfo> group,
                                         std::vector<at::Tensor> keep,
                                         std::shared_ptr<const NcclTicket> message = nullptr);
  void issue(CommStream& stream, NcclTicket& ticket, const StreamOrigin& origin, const Issue& issue,
             const std::function<void()>& after = {});

  /// The current stream waits for it; the host does not, unless the world was made with block_host.
  void wait(NcclTicket& ticket);
  /// The host waits for it.
  void finish(const NcclTicket& ticket);
  /// The host waits until NCCL has taken the call; what it must wait for then.
  std::shared_ptr<Mark> taken(const NcclTicket& ticket);

  /// Gives the communicators back in good order, which takes all ranks: each waits for its peers,
  /// within the timeout.
  void close();
  /// Records `reason` as the fault, if it is the first, and aborts. Any thread may call it.
  void stop(const std::string& reason);
  void throw_if_stopped() const;

 private:
  struct Member {
    NcclComm comm;
    std::shared_ptr<const NcclGroupInfo> group;
  };
  using What = std::function<std::string()>;  // texts are made only when something is wrong
  using IsLate = std::function<bool()>;

  std::string late(const std::string& what, const NcclGroupInfo& group) const;
  std::string error_text(NcclResult result, NcclComm comm) const;
  void settle(std::unique_lock<std::mutex>& calls, const Member& member, NcclResult result,
              const IsLate& is_late, const What& what);
  bool is_late(const NcclTicket& ticket) const;
  NcclResult state_of(NcclComm comm) const;
  void drain();
  void watch();
  void look();
  void guard();

  const std::shared_ptr<const NcclApi> api_;
  const at::Device device_;
  const int rank_;  // in the world
  const std::chrono::milliseconds timeout_;
  const bool block_host_;
  const int num_exceptions_;  // on their way when the world was made
  const std::unique_ptr<CommStream> stream_;

  std::mutex calls_;  // held around calls of NCCL; taken before state_
  mutable std::mutex state_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  std::deque<std::shared_ptr<NcclTicket>> tickets_;  // in progress, in the order of their calls
  Clock::time_point last_end_;                       // of anything
  std::vector<std::unique_ptr<NcclChannel>> channels_;
  std::string fault_;
  bool ending_ = false;
  std::optional<Clock::time_point> asks_since_;  // the watchdog asks the device, or aborts
  const std::shared_ptr<flight::Recorder> recorder_ = flight::current();
  std::thread watchdog_, guard_;
};

// The messages from one rank to another, through NCCL. What keeps two ranks from waiting for each
// other for ever:
//   - A channel has a communicator and a stream of its own at both ends. On a stream that it shared
//     with collectives, or with messages of another channel, a receive which was started early would
//     hold up what its sender waits for. On its own stream, message k waits for message k - 1 of
//     only the same channel, and for what was queued before it was started.
//   - Calls are made by a thread of the channel. NCCL connects two ranks in the first call of each,
//     and a communicator takes no second call before: a rank that sends first would be held up
//     until its peer receives, which perhaps sends first as well.
//   - The kernels of all channels and one collective fit on the GPU at the same time: a rank of a
//     pipeline talks to two others, each NCCL kernel takes some of a GPU's multiprocessors, and what
//     else runs there ends by itself.

class NcclChannel {
 public:
  /// `group` are the two ends. The communicator is one of `world`, which outlives the channel.
  NcclChannel(NcclWorld& world, NcclComm comm, std::shared_ptr<const NcclGroupInfo> group);
  ~NcclChannel();
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;

  /// Queues one end of a message behind those before it and what the current stream holds. `x` is
  /// what is sent, or where it goes.
  std::shared_ptr<NcclTicket> enqueue(const Call& call, const at::Tensor& x, NcclType type);

 private:
  struct ChannelCall {
    std::shared_ptr<NcclTicket> ticket;
    std::shared_ptr<StreamOrigin> origin;
    at::Tensor x;
    NcclType type;
    at::Tensor header;  // int64 words: the call of the sender; undefined: it is not compared
  };
  void work();
  void run(const ChannelCall& job);
  void check_header(const ChannelCall& job);

  NcclWorld& world_;
  const NcclComm comm_;
  const std::shared_ptr<const NcclGroupInfo> group_;
  const std::unique_ptr<CommStream> stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ChannelCall> jobs_;
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace moesh::comm
