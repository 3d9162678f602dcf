#pragma once
// Links that are slower than this machine: every exchange of a rank takes at least as long as on
// them. Ranks sleep, so that the time of a step with slow links can be measured where there are
// none.

#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "moesh/comm/group.h"

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
  /// The time at which everything that a rank sends has arrived.
  void begin(const Key& key, double ready);
  /// When all that ranks of this process send in it is through. Each of them asks once, when it has
  /// what the others sent.
  double end(const Key& key);

 private:
  struct PacedExchange {
    double ready = 0;
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
/// later.
class Pacer final : public ThreadObserver {
 public:
  explicit Pacer(PacedWorld& world, const PaceClock& clock = kSteady)
      : world_(world), clock_(clock) {}
  void called(const Operation& operation) override;
  void ended(std::int64_t number) override;

 private:
  static const PaceClock kSteady;

  PacedWorld& world_;
  const PaceClock& clock_;
  double inside_free_ = 0, between_free_ = 0;  // times from which on a link is idle
  std::map<std::int64_t, PacedWorld::Key> started_;
  std::map<std::pair<std::string, std::vector<int>>, std::int64_t> num_sent_, num_received_;
};

}  // namespace moesh::comm
