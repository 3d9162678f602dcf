#pragma once
// A group of ranks, its collectives, and messages between two of them. Values are returned, inputs
// are never written (a group of one rank returns its input). Rows (dimension 0) may be uneven:
// `rows[r]` is what rank r holds, and every rank passes the same list. Backends live in threads/,
// mpi/, nccl/. An observer watches operations: traces, the flight recorder, checks.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/base/this_thread.h"

namespace moesh::comm {

enum class ReduceOp : std::uint8_t { sum, max, min };
enum class Collective : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
  barrier,
  split,
  send,
  recv
};

const char* to_string(Collective op);
const char* to_string(ReduceOp op);

/// Rows (dimension 0) per rank. Empty: the same on every rank.
using Rows = std::vector<std::int64_t>;

/// A way for messages from one rank of a group to another.
struct Channel {
  int from = 0, to = 0;
  auto operator<=>(const Channel&) const = default;
};

/// An operation that was started. `wait` ends it. Ranks wait for collectives in the same order, for
/// messages in any, and before the group is gone.
class Work {
 public:
  virtual ~Work() = default;
  virtual at::Tensor wait() = 0;
};

/// The owner of a started operation. A handle that is dropped without `wait` is waited for, since
/// the other ranks count on it; but not while an exception unwinds the rank: its peers may be
/// waiting elsewhere and learn of the exception only when it has left the rank's function.
class [[nodiscard]] Handle {
 public:
  explicit Handle(at::Tensor ready) : value_(std::move(ready)) {}
  Handle(std::unique_ptr<Work> work, std::int64_t number)
      : work_(std::move(work)), number_(number) {}
  Handle(Handle&&) = default;
  Handle& operator=(Handle&&) = delete;  // it would drop what is in progress
  ~Handle();

  /// Blocks until the result is there; throws Error (comm) when a rank left, fell out of step or is
  /// late.
  at::Tensor wait();

 private:
  std::unique_ptr<Work> work_;
  at::Tensor value_;
  std::int64_t number_ = -1;                         // of the operation
  int num_exceptions_ = std::uncaught_exceptions();  // that were unwinding when it was started
};

class Group;

/// A collective, or one end of a message, of more than one rank, as a rank calls it.
struct Operation {
  Group& group;
  Collective op;
  std::int64_t bytes = 0;         // of this rank's input; of recv, what comes
  const std::vector<int>& ranks;  // those of the world that meet
  // The arguments of a collective; x is also what is sent.
  const at::Tensor* x = nullptr;
  const Rows *rows = nullptr, *recv = nullptr;  // of each rank; of all_to_all: to and from it
  ReduceOp reduce = ReduceOp::sum;
  int root = 0;
  std::int64_t number = 0;  // no two of a process have the same

  /// The part of the input that stays with this rank (reduce_scatter, all_to_all).
  std::int64_t own_bytes() const;
};

/// Watches operations: what is not of interest need not be overridden.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void called(const Operation& /*operation*/) {}
  /// It is in progress; the rank waits for it; it has ended. It may be one that this observer was
  /// not told of.
  virtual void started(std::int64_t /*number*/) {}
  virtual void waits(std::int64_t /*number*/) {}
  virtual void ended(std::int64_t /*number*/) {}
  /// Whether it is told of what is called under an ObserverPause, too.
  virtual bool sees_all() const { return false; }
};

/// Watches what this thread starts and waits for, while it lives.
class ThreadObserver : public Observer {
 public:
  ThreadObserver();
  ~ThreadObserver() override;
  ThreadObserver(const ThreadObserver&) = delete;
  ThreadObserver& operator=(const ThreadObserver&) = delete;
};

/// The observers of a thread.
struct ThreadObservers;
ThreadObservers& thread_observers();
/// While the result lives, this thread has the observers of another one, which works for the same
/// rank and waits meanwhile.
ScopedValue<ThreadObservers*> use_observers_of(ThreadObservers& other);

/// Watches what is called on a group, and on those that come from it, by whatever thread.
class GroupObserver : public Observer {
 public:
  /// The observers of a new group.
  virtual std::shared_ptr<GroupObserver> for_new_group() const = 0;
  virtual void expect_same(Group& group, const at::Tensor& x, std::string_view what) = 0;
};

/// While it lives, observers are told of nothing that this thread calls: what a wrapper sends on
/// its own account is not the program's doing.
class ObserverPause {
 public:
  ObserverPause();
  ~ObserverPause();
  ObserverPause(const ObserverPause&) = delete;
  ObserverPause& operator=(const ObserverPause&) = delete;
};

class Group {
 public:
  virtual ~Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  /// Its name in messages: "world", "tp", ...
  const std::string& name() const { return name_; }
  /// World ranks, by rank in this group.
  const std::vector<int>& members() const { return members_; }

  /// [..] -> [..], the sum (max, min) over the ranks. Same bits on every rank, every run.
  at::Tensor all_reduce(const at::Tensor& x, ReduceOp op = ReduceOp::sum) {
    return start_all_reduce(x, op).wait();
  }
  /// [rows[rank], ..] -> [sum of rows, ..]
  at::Tensor all_gather(const at::Tensor& x, Rows rows = {}) {
    return start_all_gather(x, std::move(rows)).wait();
  }
  /// [sum of rows, ..] -> [rows[rank], ..]
  at::Tensor reduce_scatter(const at::Tensor& x, Rows rows = {}, ReduceOp op = ReduceOp::sum) {
    return start_reduce_scatter(x, std::move(rows), op).wait();
  }
  /// [sum of send, ..] -> [sum of recv, ..]: send[r] rows go to rank r, recv[r] rows come from it,
  /// in rank order.
  at::Tensor all_to_all(const at::Tensor& x, Rows send, Rows recv) {
    return start_all_to_all(x, std::move(send), std::move(recv)).wait();
  }
  /// The value of rank `root`; every rank passes a tensor of its shape.
  at::Tensor broadcast(const at::Tensor& x, int root) { return start_broadcast(x, root).wait(); }
  /// Returns when every rank has come.
  void barrier();

  /// Started, not waited for: x must not be written before `wait`, since peers may still read it.
  Handle start_all_reduce(const at::Tensor& x, ReduceOp op = ReduceOp::sum);
  Handle start_all_gather(const at::Tensor& x, Rows rows = {});
  Handle start_reduce_scatter(const at::Tensor& x, Rows rows = {}, ReduceOp op = ReduceOp::sum);
  Handle start_all_to_all(const at::Tensor& x, Rows send, Rows recv);
  Handle start_broadcast(const at::Tensor& x, int root);

  /// Every rank calls it, with the same list, before the first message on one of these channels:
  /// what a channel needs is made while both ends are there, so that no start waits for its peer.
  void open_channels(const std::vector<Channel>& channels);
  /// A message to rank `to`, which starts the receive of it. Messages of one channel arrive in the
  /// order in which they were started, and any number may be in progress; those of other channels,
  /// and collectives, go their own ways. x is kept until `wait` and must not be written before it.
  /// `label` is compared with that of the receive: a number of the caller's for what it sends.
  /// `wait` may need the receiver to have started its receive: a rank that waits for a send before
  /// starting a receive which that rank needs first waits for itself, until the deadline.
  Handle start_send(const at::Tensor& x, int to, std::int64_t label = 0);
  /// The next message of rank `from`, whose sizes, dtype and label are known here. -> [sizes]
  Handle start_recv(at::IntArrayRef sizes, const at::TensorOptions& options, int from,
                    std::int64_t label = 0);

  /// Ranks of one color form a group, ordered by (key, rank). A negative color: this rank is in
  /// none (nullptr).
  std::shared_ptr<Group> split(int color, int key, const std::string& name);

  /// A group of the same ranks for a second thread of each rank, such as one that saves: its
  /// collectives take tensors on the host and run beside those of this group, in any order.
  std::shared_ptr<Group> background(const std::string& name);

  /// A promise that `x` is the same on every rank. Only observers of the group look; `what` names
  /// the tensor in their message.
  void expect_same(const at::Tensor& x, std::string_view what);

  /// From now on it is told of every operation, before that begins.
  void add(std::shared_ptr<GroupObserver> observer) { observers_.push_back(std::move(observer)); }

  /// Whether `wait` returns when the other ranks have come: else the device waits for them.
  virtual bool meets_on_host() const { return true; }
  /// Where small tensors that no caller chose a device for must live.
  virtual at::Device control_device() const { return at::kCPU; }

 protected:
  Group(std::string name, int rank, std::vector<int> members);

  // The backend's part. Arguments are checked, x is contiguous, rows are filled in, and size() > 1.
  virtual std::unique_ptr<Work> do_all_reduce(const at::Tensor& x, ReduceOp op) = 0;
  virtual std::unique_ptr<Work> do_all_gather(const at::Tensor& x, const Rows& rows) = 0;
  virtual std::unique_ptr<Work> do_reduce_scatter(const at::Tensor& x, const Rows& rows,
                                                  ReduceOp op) = 0;
  virtual std::unique_ptr<Work> do_all_to_all(const at::Tensor& x, const Rows& send,
                                              const Rows& recv) = 0;
  virtual std::unique_ptr<Work> do_broadcast(const at::Tensor& x, int root) = 0;
  virtual void do_barrier() = 0;
  /// One end of a message: the rank at the other end, its number on the channel, the label.
  struct Message {
    int peer = 0;
    std::int64_t number = 0;
    std::int64_t label = 0;
  };
  virtual void do_open_channels(const std::vector<Channel>& /*channels*/) {}
  virtual std::unique_ptr<Work> do_send(const at::Tensor& x, const Message& message) = 0;
  virtual std::unique_ptr<Work> do_recv(at::IntArrayRef sizes, const at::TensorOptions& options,
                                        const Message& message) = 0;
  /// `members` are ranks of this group, in the order of the new one; `rank` is this rank's place
  /// among them. `index` is the number of the new group among those which this split makes:
  /// (parent, split count, index) names it everywhere. Called on every rank, also on one that is in
  /// no group (no members, -1, -1) or a group of its own: there the result is not used.
  virtual std::shared_ptr<Group> do_split(const std::vector<int>& members, int rank, int index,
                                          const std::string& name) = 0;
  virtual std::shared_ptr<Group> do_background(const std::string& name) {
    return split(0, rank(), name);
  }

  /// World ranks of ranks of this group.
  std::vector<int> world_ranks(const std::vector<int>& ranks) const;

 private:
  void check(Collective op, const at::Tensor& x) const;
  void check_kind(Collective op, at::ScalarType dtype, std::int64_t num_dims) const;
  void check_channel(Collective op, const Channel& channel) const;
  void check_open(Collective op, const Channel& channel) const;
  void check_reduce(Collective op, const at::Tensor& x, ReduceOp reduce) const;
  Rows fill(Collective op, Rows rows, std::int64_t total, const char* what) const;
  /// Tells the observers, and gives its number.
  std::int64_t call(Operation operation);
  std::int64_t call(Collective op, const at::Tensor& x, const Rows* rows = nullptr,
                    const Rows* recv = nullptr, ReduceOp reduce = ReduceOp::sum, int root = 0);
  std::shared_ptr<Group> observed(std::shared_ptr<Group> group) const;

  std::string name_;
  int rank_;
  std::vector<int> members_;
  std::set<Channel> channels_;                         // that are open
  std::vector<std::int64_t> num_sent_, num_received_;  // messages to and from each rank
  std::vector<std::shared_ptr<GroupObserver>> observers_;
};

/// The group of one rank, for programs without a world.
std::shared_ptr<Group> solo_group(const std::string& name = "solo");

}  // namespace moesh::comm
