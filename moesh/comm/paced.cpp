#include "moesh/comm/paced.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/comm/cuda/sleep.h"
#include "moesh/comm/observers.h"

namespace moesh::comm {
namespace {

using Seconds = std::chrono::duration<double>;
using SteadyClock = std::chrono::steady_clock;

// When a link that is idle from `free` on, which it then is later, is through with what takes this
// long.
double through(double seconds, double now, double& free) {
  if (seconds == 0) return now;
  free = std::max(now, free) + seconds;
  return free;
}

class GpuLink final : public DeviceLink {
 public:
  explicit GpuLink(at::Device device) : stream_(device_stream(device)) {}
  std::shared_ptr<Mark> carry(double seconds) override {
    stream_->follow(*stream_->here());
    stream_->run([&] {
      const char* error = cuda::sleep(stream_->handle(), std::llround(1e9 * seconds));
      MOESH_CHECK(!error, ErrorKind::device, "links are not slowed down on this GPU: ", error,
                  "; leave debug.links out");
    });
    return stream_->mark();
  }

 private:
  std::unique_ptr<CommStream> stream_;
};

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

void PacedWorld::begin(const Key& key, const Arrival& arrival) {
  const std::lock_guard lock(mutex_);
  Arrival& all = exchanges_[key].arrival;
  all.time = std::max(all.time, arrival.time);
  all.marks.insert(all.marks.end(), arrival.marks.begin(), arrival.marks.end());
}

Arrival PacedWorld::end(const Key& key) {
  const std::lock_guard lock(mutex_);
  const auto found = exchanges_.find(key);
  const Arrival arrival = found->second.arrival;
  if (++found->second.num_ended == num_here(key.ranks)) exchanges_.erase(found);
  return arrival;
}

Pacer::Travel Pacer::travel_of(const Operation& o) const {
  const Links& links = world_.links();
  const SentParts sent = sent_parts(o, links.ranks_per_node);
  const auto seconds = [](std::int64_t bytes, const Link& link) {
    return bytes == 0 ? 0 : static_cast<double>(bytes) / link.bandwidth;
  };
  Travel travel{.inside = seconds(sent.inside, links.inside),
                .between = seconds(sent.between, links.between)};
  // A receiver has nothing to send, and waits for the sender.
  if (o.op == Collective::recv) return travel;
  travel.crosses =
      links.ranks_per_node > 0 && std::any_of(o.ranks.begin(), o.ranks.end(), [&](int r) {
        return r / links.ranks_per_node != o.ranks[0] / links.ranks_per_node;
      });
  travel.latency = travel.crosses ? links.between.latency : links.inside.latency;
  return travel;
}

Arrival Pacer::on_host(const Travel& t) {
  const double now = clock_.now();
  return {.time = std::max(through(t.inside, now, inside_free_),
                           through(t.between, now, between_free_)) +
                  t.latency,
          .marks = {}};
}

// What is on the host, agreements for one, travels by the clock where a rank has a device, too.
bool Pacer::uses_device(at::Device device) {
  auto inside = inside_ && device == device_ ? nullptr : make_link_(device);
  if (inside) inside_ = std::move(inside), between_ = make_link_(device), device_ = device;
  return inside_ && device == device_;
}

Arrival Pacer::on_device(const Travel& t) {
  Arrival arrival;
  const auto carry = [&](DeviceLink& link, double seconds) {
    if (seconds > 0) arrival.marks.push_back(link.carry(seconds));
  };
  carry(*inside_, t.inside + (t.crosses ? 0 : t.latency));
  carry(*between_, t.between + (t.crosses ? t.latency : 0));
  return arrival;
}

void Pacer::called(const Operation& o) {
  const Travel travel = travel_of(o);
  const Arrival arrival = o.x && uses_device(o.x->device()) ? on_device(travel) : on_host(travel);
  auto& counts = o.op == Collective::recv ? num_received_ : num_sent_;
  const bool is_message = o.op == Collective::send || o.op == Collective::recv;
  // A channel has its own numbers, and so has each group.
  const std::string name = o.group.name() + (is_message ? " message" : "");
  const PacedWorld::Key key{name, o.ranks, counts[{name, o.ranks}]++};
  world_.begin(key, arrival);
  started_.emplace(o.number, key);
}

void Pacer::ended(std::int64_t number) {
  const auto found = started_.find(number);
  if (found == started_.end()) return;
  const Arrival arrival = world_.end(found->second);
  started_.erase(found);
  for (const auto& mark : arrival.marks) mark->hold_current();
  clock_.sleep_until(arrival.time);
}

std::unique_ptr<DeviceLink> gpu_link(at::Device device) {
  if (device.is_cpu()) return nullptr;
  MOESH_CHECK(device.is_cuda(), ErrorKind::config, "links are slowed down on CPUs and CUDA GPUs, ",
              "and a tensor is on ", device, "; leave the links out");
  return std::make_unique<GpuLink>(device);
}

}  // namespace moesh::comm
