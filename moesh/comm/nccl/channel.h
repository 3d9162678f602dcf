#pragma once
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

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "moesh/comm/nccl/world.h"

namespace moesh::comm {

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
