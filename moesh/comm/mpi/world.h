#pragma once
// A world of MPI processes as one of them sees it: which ranks have left, how messages are told
// apart, and waits that end at a deadline.

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moesh/comm/host_group.h"
#include "moesh/comm/mpi/requests.h"
#include "moesh/comm/rank_status.h"

namespace moesh::comm::mpi {

// MPI in this process: started by the first launch. It is ended at exit if the last world ended
// well: MPI_Finalize waits for all processes, and one that exits without it makes the launcher end
// the job.
class Process {
 public:
  static Process& instance(std::chrono::milliseconds timeout);

  MPI_Comm comm() const { return comm_; }
  int index() const { return index_; }
  int size() const { return size_; }
  int num_on_machine() const { return num_on_machine_; }
  int tag_limit() const { return tag_limit_; }

  std::mutex running;  // held by the launch in progress
  std::int64_t num_launches = 0;
  bool unusable = false;                       // a world's start was given up half-way
  static inline std::atomic<bool> ended_well;  // the last world
 private:
  explicit Process(std::chrono::milliseconds timeout);

  MPI_Comm comm_ = MPI_COMM_NULL;
  int index_ = 0, size_ = 1, num_on_machine_ = 1, tag_limit_ = 0;
};

constexpr int kWorldContext = 1;

// A message to the other processes about one of its ranks. Small, so that MPI takes it at once.
struct RankNotice {
  std::int32_t rank = 0;
  std::int32_t failed = 0;
  ErrorKind kind = ErrorKind::comm;
  char text[2000] = {};
};

// A message that comes. First its header, and when that fits, what it says.
class MpiArrival {
 public:
  virtual ~MpiArrival() = default;
  // Lets MPI work; true when there is nothing more to do.
  virtual bool advance() = 0;
};

// Shared by the groups of one rank.
struct RankInfo {
  int next_context = kWorldContext + 1;
  // Spans sent so far. The groups of a rank may be used by two threads, and no two spans in
  // progress may have one tag.
  std::atomic<std::int64_t> num_blocks = 0;

  // Messages that come are taken on by whatever the rank waits for: else two ranks that wait for
  // what they send each other would wait for ever.
  void advance() {
    const std::lock_guard lock(mutex);
    std::erase_if(arriving, [](const auto& message) { return message->advance(); });
  }
  std::mutex mutex;  // of what follows
  std::vector<std::shared_ptr<MpiArrival>> arriving;
};

// A group as its exchanges know it.
struct GroupInfo {
  std::string name;
  std::vector<int> members;  // world ranks
  int rank = 0;              // in the group
  int context = 0;           // tells its headers from those of other groups with common members
  std::shared_ptr<RankInfo> of_rank = std::make_shared<RankInfo>();

  int world_rank() const { return members[static_cast<size_t>(rank)]; }
};

// This process's side of one world. Each has a communicator of its own, so that no message of an
// earlier one is ever matched.
class MpiWorld {
 public:
  MpiWorld(Process& process, int num_ranks, std::chrono::milliseconds timeout);

  MPI_Comm comm() const { return comm_; }
  int num_ranks() const { return num_ranks_; }
  int first_rank() const { return process_.index() * per_process_; }
  int per_process() const { return per_process_; }
  int process_of(int rank) const { return rank / per_process_; }
  const RankStatus& roll() const { return roll_; }
  int max_context() const { return process_.tag_limit() >> (2 * thread_bits_ + 6); }

  // Tags: headers are even, and matched by group, threads and exchange (of those in progress), or
  // by group and threads where they are of messages, which MPI keeps in order; spans are odd, and
  // the header that goes before one tells its tag: `count` spans were sent by that thread before.
  int header_tag(int context, int from, int to, const Call& call) const {
    const int which =
        call.is_message() ? 4 : static_cast<int>(call.sequence & 7) << 3 | call.phase << 1;
    return (context << 2 * thread_bits_ | threads(from, to)) << 6 | which;
  }
  int block_tag(int from, int to, std::int64_t count) const {
    const std::int64_t limit = (std::int64_t{process_.tag_limit()} + 1) >> (2 * thread_bits_ + 1);
    return (static_cast<int>(count % limit) << 2 * thread_bits_ | threads(from, to)) << 1 | 1;
  }

  // Lets MPI work until `is_done`. `missing` are the world ranks that are waited for.
  void wait(const std::function<bool()>& is_done, const std::function<std::vector<int>()>& missing,
            const Call& call, const GroupInfo& group, const char* where);
  // Works on the requests until all are done. Peers are ranks of the group.
  void wait(Requests& requests, const Call& call, const GroupInfo& group, const char* where);

  // A rank of this process returned or threw: everyone is told.
  void leave(int rank, std::exception_ptr fault);

  // Returns when every rank of the world has returned; else throws.
  void finish();

 private:
  struct Outbox {
    std::vector<std::unique_ptr<RankNotice>> news;
    Requests requests;
    bool active() const { return requests.active(); }
  };
  struct Greeting {
    std::int64_t launch = 0, num_ranks = 0;
  };
  struct Meeting {
    Greeting mine;
    std::vector<Greeting> theirs;
    Requests requests;
    MPI_Comm comm = MPI_COMM_NULL;
    bool active() const { return requests.active(); }
  };

  // All processes come, with the same number of ranks, and make the communicator.
  void meet();
  void greet(Meeting& m);

  // Waits for messages of other processes than those of a group's ranks.
  void complete(Requests& requests, const char* what);

  int threads(int from, int to) const {
    return from % per_process_ << thread_bits_ | to % per_process_;
  }

  // Takes in what other processes have said. Ranks that wait take turns.
  void listen();
  void listen_again();
  void hang_up();

  Process& process_;
  const int num_ranks_, per_process_;
  int thread_bits_ = 0;
  const std::chrono::milliseconds timeout_;
  RankStatus roll_;
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::mutex listening_, sending_;
  std::unique_ptr<RankNotice> inbox_ = std::make_unique<RankNotice>();
  const Buffers<Outbox> outbox_{new Outbox};
  MPI_Request incoming_ = MPI_REQUEST_NULL;
};

// Throws where this rank has left the world.
void check_usable(const MpiWorld& world, const GroupInfo& group, const Call& call);

// The header of each span.
struct Header {
  Call call;
  std::int64_t numel = 0;
  std::int64_t tag = 0;
};

// MPI counts in int: a large span is several messages.
template <class F>
void for_pieces(void* data, std::int64_t bytes, const F& f) {
  constexpr std::int64_t kPieceBytes = 16 << 20;
  for (std::int64_t start = 0; start < bytes; start += kPieceBytes)
    f(static_cast<char*>(data) + start, static_cast<int>(std::min(kPieceBytes, bytes - start)));
}

}  // namespace moesh::comm::mpi
