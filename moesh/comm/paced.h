#pragma once
// Links that are slower than this machine: every exchange of a rank takes at least as long as on
// them. Ranks sleep, and on a GPU a queue beside the computation does, so that the time of a step
// with slow links can be measured where there are none.

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/comm/stream.h"

namespace moesh::comm {

struct Link {
  double latency = 0;                                          // seconds of an exchange
  double bandwidth = std::numeric_limits<double>::infinity();  // bytes/s that a rank sends
};

/// Ranks of the world are numbered node by node; 0: all are on one.
struct Links {
  Link inside, between;  // a node, nodes
  int ranks_per_node = 0;
};

/// Seconds since some time. Tests have another.
class PaceClock {
 public:
  virtual ~PaceClock() = default;
  virtual double now() const;
  virtual void sleep_until(double time) const;
};

/// A link of a rank on a device: it carries one exchange after the other.
class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  /// Carries for so long what the current stream has made by now. Its end.
  virtual std::shared_ptr<Mark> carry(double seconds) = 0;
};
/// On a GPU: a stream, on which a kernel of one block sleeps. On the host: null.
std::unique_ptr<DeviceLink> gpu_link(at::Device device);
/// The name of that kernel.
constexpr std::string_view kLinkKernel = "sleep_on_link";

/// When all that the ranks of an exchange send is through: a time, and marks on a device.
struct Arrival {
  double time = 0;
  std::vector<std::shared_ptr<Mark>> marks;
};

/// The exchanges of the ranks of this process, `num_ranks` from `first` on, for each other to see.
class PacedWorld {
 public:
  explicit PacedWorld(const Links& links, int first, int num_ranks)
      : links_(links), first_(first), num_ranks_(num_ranks) {}

  const Links& links() const { return links_; }
  /// An exchange of these ranks: the group and how many it had before; of a message, its channel.
  struct Key {
    std::string group;
    std::vector<int> ranks;
    std::int64_t number;
    auto operator<=>(const Key&) const = default;
  };
  /// When everything that a rank sends has arrived.
  void begin(const Key& key, const Arrival& arrival);
  /// When all that ranks of this process send in it is through. Each of them asks once, when it has
  /// what the others sent.
  Arrival end(const Key& key);

 private:
  struct PacedExchange {
    Arrival arrival;
    int num_ended = 0;
  };
  int num_here(const std::vector<int>& ranks) const;

  Links links_;
  int first_, num_ranks_;
  std::mutex mutex_;
  std::map<Key, PacedExchange> exchanges_;
};

/// Lets the exchanges of this thread take their time while it lives: starting one returns at once,
/// and waiting for it ends when the bytes of all its ranks would have come. A link carries one
/// exchange of a rank after the other. What other observers see of a wait has it in, if they come
/// later. Where tensors are on a device, its current stream waits instead of the thread; there a
/// link is taken for the latency of an exchange as well.
class Pacer final : public ThreadObserver {
 public:
  using MakeLink = std::function<std::unique_ptr<DeviceLink>(at::Device)>;
  explicit Pacer(PacedWorld& world, const PaceClock& clock = kSteady, MakeLink make_link = gpu_link)
      : world_(world), clock_(clock), make_link_(std::move(make_link)) {}
  void called(const Operation& operation) override;
  void ended(std::int64_t number) override;

 private:
  static const PaceClock kSteady;

  /// In seconds: what each link is taken for, and the latency of the exchange.
  struct Travel {
    double inside = 0, between = 0, latency = 0;
    bool crosses = false;  // it is that between nodes
  };
  Travel travel_of(const Operation& operation) const;
  Arrival on_host(const Travel& travel);
  Arrival on_device(const Travel& travel);
  bool uses_device(at::Device device);

  PacedWorld& world_;
  const PaceClock& clock_;
  const MakeLink make_link_;
  double inside_free_ = 0, between_free_ = 0;     // times from which on a link is idle
  std::unique_ptr<DeviceLink> inside_, between_;  // of the device that the rank has
  at::Device device_ = at::kCPU;
  std::map<std::int64_t, PacedWorld::Key> started_;
  std::map<std::pair<std::string, std::vector<int>>, std::int64_t> num_sent_, num_received_;
};

}  // namespace moesh::comm
