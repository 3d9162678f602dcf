#include "moesh/comm/observers.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <mutex>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"

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

namespace moesh::comm {

std::int64_t sent_bytes(Collective op, std::int64_t bytes, std::int64_t own, int num_ranks) {
  const std::int64_t n = num_ranks;
  switch (op) {
    case Collective::all_reduce: return 2 * bytes * (n - 1) / n;
    case Collective::all_gather: return bytes * (n - 1);
    case Collective::reduce_scatter:
    case Collective::all_to_all: return bytes - own;
    case Collective::broadcast: return bytes * (n - 1) / n;
    case Collective::send: return bytes;
    case Collective::barrier:
    case Collective::split:
    case Collective::recv: return 0;
  }
  return 0;
}

SentParts sent_parts(const Operation& o, int ranks_per_node) {
  const std::int64_t all =
      sent_bytes(o.op, o.bytes, o.own_bytes(), static_cast<int>(o.ranks.size()));
  if (ranks_per_node == 0 || all == 0) return {.inside = all};
  const auto node = [&](int rank) { return rank / ranks_per_node; };
  const int mine = node(o.group.members()[static_cast<size_t>(o.group.rank())]);
  std::int64_t between = 0;
  if (o.op == Collective::all_to_all) {
    const std::int64_t row = o.bytes / o.x->size(0);
    for (size_t r = 0; r < o.ranks.size(); ++r)
      if (node(o.ranks[r]) != mine) between += row * (*o.rows)[r];
  } else {
    std::set<int> nodes;
    for (const int r : o.ranks) nodes.insert(node(r));
    // Those of the n - 1 steps of a ring that lead to another node, once for each.
    const auto others = static_cast<std::int64_t>(nodes.size()) - 1;
    between = all * others / (static_cast<std::int64_t>(o.ranks.size()) - 1);
  }
  return {.inside = all - between, .between = between};
}

void SentBytes::called(const Operation& o) {
  Traffic& entry = ledger_[{o.group.name(), o.op}];
  ++entry.num_calls;
  entry.num_bytes += sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size());
}

std::map<std::string, std::int64_t> SentBytes::take() {
  std::map<std::string, std::int64_t> bytes;
  for (const auto& [key, entry] : std::exchange(ledger_, {})) bytes[key.first] += entry.num_bytes;
  return bytes;
}

namespace {

constexpr std::int64_t kHeaderSize = sizeof(Call) / sizeof(std::int64_t);
static_assert(sizeof(Call) % sizeof(std::int64_t) == 0, "a call travels as whole int64 words");

std::uint64_t mix_in(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15;
  return hash ^ (hash >> 29);
}

// A hash of shape, dtype and bytes.
std::uint64_t hash_of(const at::Tensor& x) {
  const at::Tensor host = x.detach().cpu().contiguous();
  std::uint64_t hash = mix_in(0x6d6f657368, static_cast<std::uint64_t>(host.scalar_type()));
  for (auto s : host.sizes()) hash = mix_in(hash, static_cast<std::uint64_t>(s));
  const auto* bytes = static_cast<const char*>(host.const_data_ptr());
  size_t left = host.nbytes();
  for (; left >= 8; left -= 8, bytes += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes, 8);
    hash = mix_in(hash, word);
  }
  std::uint64_t tail = 0;
  if (left) std::memcpy(&tail, bytes, left);
  return mix_in(hash, tail);
}

class Checker final : public GroupObserver {
 public:
  std::shared_ptr<GroupObserver> for_new_group() const override {
    return std::make_shared<Checker>();
  }

  void called(const Operation& o) override {
    // The backend compares what is sent with what is expected: here a start would wait for
    // its peer.
    if (is_own_ || o.op == Collective::send || o.op == Collective::recv) return;
    Call call;
    if (o.x) call = Call::of(o.op, 0, *o.x, o.reduce, o.root);
    if (o.rows && !o.recv) call = call.with(*o.rows);
    call.sequence = sequence_++;
    compare(call, o);
    if (o.recv) compare_counts(call, o);
  }

  void expect_same(Group& group, const at::Tensor& x, std::string_view what) override {
    const auto hash = hash_of(x);
    const at::Tensor all = gather(group, {static_cast<std::int64_t>(hash)}, x.device());
    const auto* p = all.const_data_ptr<std::int64_t>();
    for (int r = 1; r < group.size(); ++r)
      MOESH_CHECK(p[r] == p[0], ErrorKind::comm, "'", what,
                  "' is promised to be the same on every rank of group '", group.name(),
                  "' (R or I), and rank ", group.members()[static_cast<size_t>(r)],
                  " holds a different value from rank ", group.members()[0],
                  " (checked before operation ", sequence_,
                  "). A reduction before it was left out, or the ranks started from other values.");
  }

 private:
  // [size, words]: the words of every rank, on the host.
  at::Tensor gather(Group& group, const std::vector<std::int64_t>& words,
                    const at::Device& device) {
    const ObserverPause quiet;
    const auto n = static_cast<std::int64_t>(words.size());
    is_own_ = true;  // stays so where the gather throws: that is the end of the group
    const auto all = group.all_gather(at::tensor(words, at::kLong).reshape({1, n}).to(device));
    is_own_ = false;
    return all.cpu();
  }

  static at::Device device_of(const Operation& o) {
    return o.x ? o.x->device() : o.group.control_device();
  }

  void compare(const Call& call, const Operation& o) {
    std::vector<std::int64_t> words(kHeaderSize);
    std::memcpy(words.data(), &call, sizeof(Call));
    const at::Tensor all = gather(o.group, words, device_of(o));
    std::vector<Call> calls(static_cast<size_t>(o.group.size()));
    std::memcpy(static_cast<void*>(calls.data()), all.const_data_ptr(), all.nbytes());
    const std::string verdict = disagreement(calls, o.group.members(), o.group.name());
    MOESH_CHECK(verdict.empty(), ErrorKind::comm, verdict);
  }

  // The rows that rank i sends to rank j must be those that j expects from i.
  void compare_counts(const Call& call, const Operation& o) {
    std::vector<std::int64_t> words(*o.rows);
    words.insert(words.end(), o.recv->begin(), o.recv->end());
    const at::Tensor all = gather(o.group, words, device_of(o));
    const auto* p = all.const_data_ptr<std::int64_t>();
    const int n = o.group.size();
    const auto& members = o.group.members();
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) {
        const auto sent = p[i * 2 * n + j], expected = p[j * 2 * n + n + i];
        MOESH_CHECK(sent == expected, ErrorKind::comm, "in ", call.describe(), ", operation ",
                    call.sequence, " of group '", o.group.name(), "', rank ",
                    members[static_cast<size_t>(i)], " sends ", sent, " rows to rank ",
                    members[static_cast<size_t>(j)], ", which expects ", expected);
      }
  }

  std::int64_t sequence_ = 0;
  bool is_own_ = false;  // what is called now
};

}  // namespace

void check_ranks(Group& group) {
  if (group.size() > 1) group.add(std::make_shared<Checker>());
}

}  // namespace moesh::comm
