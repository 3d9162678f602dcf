#include "moesh/comm/paced.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "moesh/comm/observers.h"

namespace moesh::comm {
namespace {

using Seconds = std::chrono::duration<double>;
using SteadyClock = std::chrono::steady_clock;

// When `bytes` are through a link that is idle from `free` on, which it then is later.
double through(const Link& link, double now, std::int64_t bytes, double& free) {
  if (bytes == 0) return now;
  free = std::max(now, free) + static_cast<double>(bytes) / link.bandwidth;
  return free;
}

}  // namespace

const PaceClock Pacer::kSteady{};

double PaceClock::now() const { return Seconds(SteadyClock::now().time_since_epoch()).count(); }

void PaceClock::sleep_until(double time) const {
  std::this_thread::sleep_until(
      SteadyClock::time_point(std::chrono::duration_cast<SteadyClock::duration>(Seconds(time))));
}

int PacedWorld::num_here(const std::vector<int>& ranks) const {
  return static_cast<int>(std::count_if(
      ranks.begin(), ranks.end(), [&](int r) { return r >= first_ && r < first_ + num_ranks_; }));
}

void PacedWorld::begin(const Key& key, double ready) {
  const std::lock_guard lock(mutex_);
  PacedExchange& e = exchanges_[key];
  e.ready = std::max(e.ready, ready);
}

double PacedWorld::end(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto found = exchanges_.find(key);
  const double ready = found->second.ready;
  if (++found->second.num_ended == num_here(key.ranks)) exchanges_.erase(found);
  return ready;
}

void Pacer::called(const Operation& o) {
  const Links& links = world_.links();
  const SentParts sent = sent_parts(o, links.ranks_per_node);
  const double now = clock_.now();
  double ready = std::max(through(links.inside, now, sent.inside, inside_free_),
                          through(links.between, now, sent.between, between_free_));
  // A receiver has nothing to send, and waits for the sender.
  if (o.op != Collective::recv) {
    const bool crosses =
        links.ranks_per_node > 0 && std::any_of(o.ranks.begin(), o.ranks.end(), [&](int r) {
          return r / links.ranks_per_node != o.ranks[0] / links.ranks_per_node;
        });
    ready += crosses ? links.between.latency : links.inside.latency;
  }
  auto& counts = o.op == Collective::recv ? num_received_ : num_sent_;
  const bool is_message = o.op == Collective::send || o.op == Collective::recv;
  // A channel has its own numbers, and so has each group.
  const std::string name = o.group.name() + (is_message ? " message" : "");
  const PacedWorld::Key key{name, o.ranks, counts[{name, o.ranks}]++};
  world_.begin(key, ready);
  started_.emplace(o.number, key);
}

void Pacer::ended(std::int64_t number) {
  const auto found = started_.find(number);
  if (found == started_.end()) return;
  const double ready = world_.end(found->second);
  started_.erase(found);
  clock_.sleep_until(ready);
}

}  // namespace moesh::comm
