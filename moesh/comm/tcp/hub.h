#pragma once
// The meeting point of processes that no MPI has started: it lives in the process of rank 0, lets
// in those that prove that they know the secret, and passes frames from rank to rank. It carries
// what starts a world of GPUs, and little more: the ids of NCCL, agreements over files, news of
// ranks that have failed.

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "moesh/comm/tcp/wire.h"

namespace moesh::comm {

class Hub {
 public:
  explicit Hub(const Rendezvous& meeting);
  /// Waits, for a few seconds at most, until the others have said goodbye.
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  int port() const { return port_; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class PeerState { greeting, proving, member, closing };
  struct Peer {
    Descriptor socket;
    PeerState state = PeerState::greeting;
    std::string in, out;
    Hello hello;
    Nonce nonce{};
    Clock::time_point deadline;  // of its proof
  };

  void serve();
  bool is_done() const;
  bool has_room();
  bool welcome();
  void read_from(Peer& peer);
  void write_to(Peer& peer);
  void understand(Peer& peer);
  void greet(Peer& peer);
  void judge(Peer& peer);
  void route(const FrameHeader& header, std::string_view frame);
  void send_to(int rank, std::string_view frame);
  void drop(Peer& peer);
  void lose(int rank);

  const Rendezvous meeting_;
  const Descriptor listening_;
  const int port_;
  Descriptor wake_read_, wake_write_;  // a pipe: its end is the end
  std::map<int, Peer> peers_;          // by socket
  std::vector<int> sockets_;           // by rank; -1: it has not come, or is gone
  std::vector<std::string> waiting_;   // by rank: for those that have not come
  std::vector<bool> is_gone_;
  bool is_ending_ = false;
  Clock::time_point end_;
  std::thread thread_;
};

}  // namespace moesh::comm
