#pragma once
// Processes connected by TCP: messages, the process that they meet at, and their groups.

#include <sys/types.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "moesh/comm/launch.h"
#include "moesh/comm/rank_status.h"

namespace moesh::comm {

// The messages between the processes of a world and its hub. All processes run the
// same program on machines of one kind: structures travel as they are in memory.
//
//   rank -> hub   Hello       who it is, and a random number
//   hub  -> rank  Challenge   the hub's proof, over both random numbers, and its own random number
//   rank -> hub   Digest      the rank's proof
//   hub  -> rank  RefusalLength     0, or the length of a text that says why not
//   then frames in both directions, which the hub passes on

// SHA-256 and HMAC (FIPS 180-4, RFC 2104): how processes that start together prove to each other
// that they hold the same secret, without sending it.

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// In a time that does not tell where they differ.
bool are_same(const Digest& a, const Digest& b);

struct Rendezvous {
  std::string address;  // of the machine of rank 0: a name or a number
  int port = 0;         // 0: the hub takes any that is free
  int rank = 0, size = 1;
  std::string secret;  // the same for all, and known only to them
};

using Nonce = std::array<std::uint8_t, 32>;

struct Hello {
  char greeting[8] = {'m', 'o', 'e', 's', 'h', ' ', '1', '\n'};
  std::int32_t rank = 0, size = 0;
  Nonce nonce{};
};
struct Challenge {
  Digest proof{};
  Nonce nonce{};
};
using RefusalLength = std::uint32_t;
constexpr RefusalLength kMaxRefusal = 1000;

struct FrameHeader {
  enum Kind : std::uint32_t {
    data,
    returned,  // the function of rank `from` has returned in the world of the key
    failed,    // ... has thrown: the ErrorKind in one byte, and the text that says what
    goodbye,   // the process ends in good order
  };
  std::int32_t from = 0, to = 0;  // to kEverybody: all others
  Kind kind = data;
  std::uint32_t key_bytes = 0;
  std::uint64_t bytes = 0;
};
constexpr std::int32_t kEverybody = -1;
constexpr std::uint32_t kMaxKeyBytes = 4096;
constexpr std::uint64_t kMaxFrameBytes = std::uint64_t{1} << 32;

template <class T>
std::string_view bytes_of(const T& x) {
  return {reinterpret_cast<const char*>(&x), sizeof(T)};
}

/// From the operating system; throws Error (comm) where it has none.
Nonce random_nonce();
enum class Side { hub, rank };
/// Proves that a side knows the secret, for this meeting only.
Digest proof(const std::string& secret, Side side, const Hello& hello, const Nonce& of_hub);

/// A socket, or another descriptor, that is closed with it.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  int release() {
    const int number = number_;
    number_ = -1;
    return number;
  }

 private:
  int number_;
};

/// A socket that listens at the address, or, where that is none of this machine's (a name that
/// others know it by), at all of them. Throws Error (config) where the port is taken.
Descriptor listen_at(const std::string& address, int port);
int port_of(const Descriptor& listening);
/// A connection, for which it tries again until `deadline`, since the other side may start later.
Descriptor connect_to(const std::string& address, int port,
                      std::chrono::steady_clock::time_point deadline);

// The meeting point of processes that no MPI has started: it lives in the process of rank 0, lets
// in those that prove that they know the secret, and passes frames from rank to rank. It carries
// what starts a world of GPUs, and little more: the ids of NCCL, agreements over files, news of
// ranks that have failed.

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

// A world of processes that torchrun or srun started, one rank each, over TCP. It is for what goes
// before NCCL and beside it: every message takes two hops, through the process of rank 0.

/// The connection of one rank to the others; that of rank 0 also holds the hub. Threads may use it
/// at the same time.
class TcpLink {
 public:
  using Clock = std::chrono::steady_clock;

  /// Returns when rank 0 has let it in; throws Error (comm) when that is not within `timeout`, and
  /// Error (config) when rank 0 has another secret, another size, or this rank already.
  TcpLink(Rendezvous meeting, std::chrono::milliseconds timeout);
  /// Says goodbye.
  ~TcpLink();
  TcpLink(const TcpLink&) = delete;
  TcpLink& operator=(const TcpLink&) = delete;

  int rank() const { return meeting_.rank; }
  int size() const { return meeting_.size; }
  int port() const { return meeting_.port; }

  void send(int to, FrameHeader::Kind kind, const std::string& key, std::string_view a,
            std::string_view b = {});
  /// The next frame of rank `from` under `key`, or nothing where it has not come by `until`.
  std::optional<std::vector<char>> take(int from, const std::string& key, Clock::time_point until);
  /// Which ranks have left world number `number`.
  std::shared_ptr<RankStatus> roll(std::int64_t number);

 private:
  void join(Clock::time_point deadline);
  void read_frames();
  void file(const FrameHeader& header, std::string key, std::vector<char> bytes);
  void fail_all(int rank, const std::string& text);

  Rendezvous meeting_;
  std::unique_ptr<Hub> hub_;  // of rank 0
  Descriptor socket_;
  std::mutex sending_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::map<std::pair<int, std::string>, std::deque<std::vector<char>>> frames_;
  std::map<std::int64_t, std::shared_ptr<RankStatus>> rolls_;
  std::map<int, std::string> lost_;  // ranks that no world will see again, and why
  bool is_ending_ = false;
  std::thread reader_;
};

/// Runs f on this rank, in world number `number` of the link; the same call is made by every
/// process. Throws what f throws, or an Error of its kind where another rank has failed.
void launch_on(TcpLink& link, std::int64_t number, const std::function<void(Group& world)>& f,
               const LaunchOptions& options, int num_on_machine = 1);

/// The same on the one link of this process, which is made when it is first used. `num_ranks` is 0,
/// or the number of processes. Its secret is MOESH_SECRET.
void launch_tcp(const Launcher& launcher, int num_ranks, const std::function<void(Group& world)>& f,
                const LaunchOptions& options);

}  // namespace moesh::comm
