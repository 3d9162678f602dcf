#pragma once
// A world of processes that torchrun or srun started, one rank each, over TCP. It is for what goes
// before NCCL and beside it: every message takes two hops, through the process of rank 0.

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "moesh/comm/launch.h"
#include "moesh/comm/rank_status.h"
#include "moesh/comm/tcp/hub.h"

namespace moesh::comm {

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
