#include "moesh/comm/flight.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <mutex>
#include <utility>

#include "moesh/base/error.h"

namespace moesh::comm::flight {
namespace {

using Clock = std::chrono::system_clock;

struct FlightEntry {
  std::string group;
  Collective op = Collective::barrier;
  std::int64_t bytes = 0;
  std::string
      doing;  // the work it is part of: that of the wait for it, or before that, of its call
  std::int64_t number = -1;
  Clock::time_point begin, end, wait;
  bool has_ended = false, is_waited_for = false;
};

std::string describe(const FlightEntry& e) {
  return detail::concat(to_string(e.op), " of ", e.bytes, " bytes on group '", e.group, "'",
                        e.doing.empty() ? "" : ", in ", e.doing);
}

}  // namespace

class Recorder {
 public:
  std::mutex mutex;  // of all that follows
  std::array<FlightEntry, kLength> entries;
  std::size_t num_called = 0;

  std::size_t size() const { return std::min(num_called, kLength); }
  FlightEntry& at(std::size_t n) { return entries[n % kLength]; }
  // The newest of those for which f holds, which is most often the last; null where none does.
  template <class F>
  FlightEntry* newest(const F& f) {
    for (std::size_t k = 1; k <= size(); ++k)
      if (FlightEntry& e = at(num_called - k); f(e)) return &e;
    return nullptr;
  }
};

namespace {

// That of this thread.
class FlightObserver;
FlightObserver& own();

class FlightObserver final : public Observer {
 public:
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
  std::string doing;  // what the calls and waits of its thread are a part of

  void called(const Operation& o) override {
    const std::lock_guard lock(recorder->mutex);
    FlightEntry& e = recorder->at(recorder->num_called++);
    e.group = o.group.name(), e.op = o.op, e.bytes = o.bytes, e.number = o.number;
    e.doing = own().doing;
    e.has_ended = e.is_waited_for = false;
    e.begin = Clock::now();
  }
  void waits(std::int64_t number) override {
    const std::lock_guard lock(recorder->mutex);
    FlightEntry* e = find(number);
    if (!e) return;
    e->doing = own().doing;
    e->is_waited_for = true;
    e->wait = Clock::now();
  }
  void ended(std::int64_t number) override {
    const std::lock_guard lock(recorder->mutex);
    FlightEntry* e = find(number);
    if (!e) return;
    e->end = Clock::now();
    e->has_ended = true;
  }
  bool sees_all() const override { return true; }

 private:
  // Null: it is another recorder's, or too long ago.
  FlightEntry* find(std::int64_t number) {
    return recorder->newest([&](const FlightEntry& e) { return e.number == number; });
  }
};

FlightObserver& own() {
  thread_local FlightObserver observer;  // a rank is a thread, and what it waits for is in there
  return observer;
}

std::string time_of_day(Clock::time_point point) {
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(point.time_since_epoch()).count();
  const std::time_t seconds = static_cast<std::time_t>(micros / 1'000'000);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  char text[40];
  std::snprintf(text, sizeof text, "%02d:%02d:%02d.%06lld", parts.tm_hour, parts.tm_min,
                parts.tm_sec, static_cast<long long>(micros % 1'000'000));
  return text;
}

}  // namespace

ActivityScope::ActivityScope(std::string what) : scope_(own().doing, std::move(what)) {}

std::shared_ptr<Recorder> current() { return own().recorder; }
void use(std::shared_ptr<Recorder> recorder) { own().recorder = std::move(recorder); }
Observer& of_thread() { return own(); }

std::string text(Recorder& recorder) {
  const std::lock_guard lock(recorder.mutex);
  std::string lines;
  for (std::size_t k = recorder.size(); k > 0; --k) {
    const std::size_t n = recorder.num_called - k;
    const FlightEntry& e = recorder.at(n);
    const auto micros =
        std::chrono::duration_cast<std::chrono::microseconds>(e.end - e.begin).count();
    lines += detail::concat(
        n, "  ", time_of_day(e.begin), "  ",
        e.has_ended ? detail::concat("took ", micros, " us") : std::string("has NOT ENDED"),
        !e.has_ended && e.is_waited_for ? " and is WAITED FOR" : "", "  ", describe(e), "\n");
  }
  return lines;
}

std::optional<Waiting> waiting(Recorder& recorder) {
  const std::lock_guard lock(recorder.mutex);
  const FlightEntry* e =
      recorder.newest([](const FlightEntry& x) { return x.is_waited_for && !x.has_ended; });
  if (!e) return std::nullopt;
  return Waiting{describe(*e), Clock::now() - e->wait};
}

}  // namespace moesh::comm::flight
