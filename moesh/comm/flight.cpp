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

struct Entry {
  std::string group;
  Collective op = Collective::barrier;
  std::int64_t bytes = 0;
  std::string doing;  // of what it is a part: of who waits for it, or before that of who called it
  const Work* work = nullptr;
  Clock::time_point begin, end, wait;
  bool has_ended = false, is_waited_for = false;
};

thread_local std::string doing;

std::string describe(const Entry& e) {
  return detail::concat(to_string(e.op), " of ", e.bytes, " bytes on group '", e.group, "'",
                        e.doing.empty() ? "" : ", in ", e.doing);
}

}  // namespace

class Recorder {
 public:
  std::mutex mutex;  // of all that follows
  std::array<Entry, kLength> entries;
  std::size_t num_called = 0;

  std::size_t size() const { return std::min(num_called, kLength); }
  Entry& number(std::size_t n) { return entries[n % kLength]; }
  // The newest of those for which f holds, which is most often the last; null where none does.
  template <class F>
  Entry* newest(const F& f) {
    for (std::size_t k = 1; k <= size(); ++k)
      if (Entry& e = number(num_called - k); f(e)) return &e;
    return nullptr;
  }
};

namespace {

std::shared_ptr<Recorder>& own() {
  thread_local auto recorder = std::make_shared<Recorder>();
  return recorder;
}

void end(Entry* entry) {
  if (!entry) return;  // another thread called it, or it is too long ago
  entry->end = Clock::now();
  entry->has_ended = true;
  entry->work = nullptr;
}

bool is_open(const Entry& e, const std::string& group, Collective op) {
  return !e.has_ended && !e.work && e.op == op && e.group == group;
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

Doing::Doing(std::string what) : outer_(std::exchange(doing, std::move(what))) {}
Doing::~Doing() { doing = std::move(outer_); }

std::shared_ptr<Recorder> current() { return own(); }
void use(std::shared_ptr<Recorder> recorder) { own() = std::move(recorder); }

void called(const std::string& group, Collective op, std::int64_t bytes) {
  Recorder& recorder = *own();
  const std::lock_guard lock(recorder.mutex);
  Entry& e = recorder.number(recorder.num_called++);
  e.group = group, e.op = op, e.bytes = bytes;
  e.doing = doing;
  e.work = nullptr, e.has_ended = e.is_waited_for = false;
  e.begin = Clock::now();
}

void in_progress(const std::string& group, Collective op, const Work* work) {
  Recorder& recorder = *own();
  const std::lock_guard lock(recorder.mutex);
  // `checked` calls others in between: the newest that is not in progress yet is the one.
  if (Entry* e = recorder.newest([&](const Entry& x) { return is_open(x, group, op); }))
    e->work = work;
}

void waits(const Work* work) {
  Recorder& recorder = *own();
  const std::lock_guard lock(recorder.mutex);
  Entry* e = recorder.newest([&](const Entry& x) { return x.work == work; });
  if (!e) return;
  e->doing = doing;
  e->is_waited_for = true;
  e->wait = Clock::now();
}

void ended(const Work* work) {
  Recorder& recorder = *own();
  const std::lock_guard lock(recorder.mutex);
  end(recorder.newest([&](const Entry& e) { return e.work == work; }));
}

void ended(const std::string& group, Collective op) {
  Recorder& recorder = *own();
  const std::lock_guard lock(recorder.mutex);
  end(recorder.newest([&](const Entry& e) { return is_open(e, group, op); }));
}

std::string text(Recorder& recorder) {
  const std::lock_guard lock(recorder.mutex);
  std::string lines;
  for (std::size_t k = recorder.size(); k > 0; --k) {
    const std::size_t n = recorder.num_called - k;
    const Entry& e = recorder.number(n);
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
  const Entry* e = recorder.newest([](const Entry& x) { return x.is_waited_for && !x.has_ended; });
  if (!e) return std::nullopt;
  return Waiting{describe(*e), Clock::now() - e->wait};
}

}  // namespace moesh::comm::flight
