#include "moesh/train/timeline/record.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/paced.h"

namespace moesh::train {

namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::atomic<bool> is_taken = false;

// The operators are what a kernel is linked with, and they know their thread, as a launch does.
const std::set<ActivityType> kActivities{ActivityType::CPU, ActivityType::CUDA};

torch::profiler::impl::ProfilerConfig profiler_config() {
  torch::profiler::impl::ExperimentalConfig options;
  options.profile_all_threads = true;
  return torch::profiler::impl::ProfilerConfig(
      torch::profiler::impl::ProfilerState::KINETO, /*report_input_shapes=*/false,
      /*profile_memory=*/false, /*with_stack=*/false, /*with_flops=*/false,
      /*with_modules=*/false, options);
}

std::optional<ProfilerEvent::EventSource> kind_of(const kineto::KinetoEvent& e) {
  switch (static_cast<libkineto::ActivityType>(e.activityType())) {
    case libkineto::ActivityType::CONCURRENT_KERNEL:
    case libkineto::ActivityType::GPU_MEMCPY:
    case libkineto::ActivityType::GPU_MEMSET: return ProfilerEvent::EventSource::kernel;
    case libkineto::ActivityType::CUDA_RUNTIME:
    case libkineto::ActivityType::CUDA_DRIVER: return ProfilerEvent::EventSource::launch;
    case libkineto::ActivityType::CPU_OP:
    case libkineto::ActivityType::USER_ANNOTATION: return ProfilerEvent::EventSource::op;
    default: return std::nullopt;
  }
}

// Kineto's times are those of the system's clock.
std::int64_t steady_minus_system() {
  const auto ns = [](auto clock) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(clock.time_since_epoch()).count();
  };
  return ns(std::chrono::steady_clock::now()) - ns(std::chrono::system_clock::now());
}

}  // namespace

bool is_of_link(const KernelSpan& kernel) {
  return kernel.name.find(comm::kLinkKernel) != std::string::npos;
}

std::vector<KernelSpan> kernels_of(const std::vector<ProfilerEvent>& events,
                                   const std::function<RankLane(std::int64_t thread)>& work_of) {
  using Kind = ProfilerEvent::EventSource;
  // Ops and launches are counted apart: their correlations may be the same numbers.
  std::map<std::uint64_t, RankLane> by_op, by_launch;
  for (const ProfilerEvent& e : events)
    if (e.kind != Kind::kernel && e.correlation != 0)
      (e.kind == Kind::op ? by_op : by_launch).emplace(e.correlation, work_of(e.place));
  const auto found = [](const std::map<std::uint64_t, RankLane>& all, std::uint64_t correlation) {
    const auto at = all.find(correlation);
    return at == all.end() ? RankLane() : at->second;
  };
  std::vector<KernelSpan> kernels;
  std::map<std::pair<std::int64_t, std::int64_t>, std::set<std::int64_t>> ranks_of_stream;
  for (const ProfilerEvent& e : events) {
    if (e.kind != Kind::kernel) continue;
    // Threads that ended have given their numbers to others, by which launches are known.
    RankLane of = found(by_op, e.op);
    if (of.rank < 0) of = found(by_launch, e.correlation);
    if (of.rank >= 0) ranks_of_stream[{e.device, e.place}].insert(of.rank);
    kernels.push_back({.name = e.name,
                       .device = e.device,
                       .stream = e.place,
                       .rank = of.rank,
                       .begin = e.begin,
                       .end = e.end,
                       .lane = of.lane});
  }
  for (KernelSpan& k : kernels)
    if (const auto& ranks = ranks_of_stream[{k.device, k.stream}]; k.rank < 0 && ranks.size() == 1)
      k.rank = *ranks.begin();
  return kernels;
}

void prepare_kernels() { kineto::prepareProfiler(profiler_config(), kActivities); }

RecordKernels::RecordKernels() : is_recording_(!is_taken.exchange(true)) {
  if (!is_recording_) return;
  kineto::enableProfiler(
      profiler_config(), kActivities,
      {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE, at::RecordScope::BACKWARD_FUNCTION});
}

std::vector<KernelSpan> RecordKernels::take() {
  if (!std::exchange(is_recording_, false)) return {};
  const auto result = kineto::disableProfiler();
  is_taken = false;
  const std::int64_t shift = steady_minus_system();
  std::vector<ProfilerEvent> events;
  for (const kineto::KinetoEvent& e : result->events())
    if (const auto kind = kind_of(e))
      events.push_back({.kind = *kind,
                        .name = *kind == ProfilerEvent::EventSource::kernel ? e.name() : "",
                        .device = e.deviceIndex(),
                        .place = e.deviceResourceId(),
                        .correlation = e.correlationId(),
                        .op = e.linkedCorrelationId(),
                        .begin = static_cast<std::int64_t>(e.startNs()) + shift,
                        .end = static_cast<std::int64_t>(e.endNs()) + shift});
  return kernels_of(events, rank_of_thread);
}

RecordKernels::~RecordKernels() {
  if (!is_recording_) return;
  kineto::disableProfiler();
  is_taken = false;
}

void RecordCollectives::called(const comm::Operation& o) {
  numbers_[o.number] =
      timeline_.call(to_string(o.op), o.group.name(), o.ranks, o.group.meets_on_host(), o.bytes);
}

void RecordCollectives::started(std::int64_t number) {
  if (const auto found = numbers_.find(number); found != numbers_.end())
    timeline_.started(found->second);
}

void RecordCollectives::waits(std::int64_t number) {
  if (const auto found = numbers_.find(number); found != numbers_.end())
    timeline_.wait(found->second);
}

void RecordCollectives::ended(std::int64_t number) {
  const auto found = numbers_.find(number);
  if (found == numbers_.end()) return;
  timeline_.ended(found->second);
  numbers_.erase(found);
}

namespace {

struct Observed final : at::ObserverContext {
  Observed(Timeline* t, std::int64_t s) : timeline(t), slice(s) {}
  Timeline* timeline;
  std::int64_t slice;
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& f) {
  Timeline* timeline = Timeline::current();
  if (!timeline) return nullptr;  // a thread that helps a rank
  const bool is_scope = f.scope() == at::RecordScope::USER_SCOPE;
  return std::make_unique<Observed>(
      timeline, timeline->open(is_scope ? SliceKind::scope : SliceKind::op, f.name()));
}

void end(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* observed = static_cast<Observed*>(context);
  if (observed && observed->timeline == Timeline::current())
    observed->timeline->close(observed->slice);
}

}  // namespace

RecordOperators::RecordOperators()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end))) {}

RecordOperators::~RecordOperators() { at::removeCallback(handle_); }

namespace {

struct WordWriter {
  std::vector<std::int64_t> words;

  void number(const auto& n) { words.push_back(static_cast<std::int64_t>(n)); }
  void text(const std::string& s) {
    number(s.size());
    const std::size_t at = words.size();
    words.resize(at + (s.size() + 7) / 8);
    std::memcpy(words.data() + at, s.data(), s.size());
  }
  void list(const auto& items, const auto& each) {
    number(items.size());
    for (const auto& item : items) each(item);
  }
};

struct WordReader {
  const std::vector<std::int64_t>& words;
  std::size_t at = 0;

  template <class T>
  void number(T& n) {
    need(1);
    n = static_cast<T>(words[at++]);
  }
  void text(std::string& s) {
    std::size_t size = 0;
    number(size);
    need(size / 8 + (size % 8 != 0));
    s.assign(reinterpret_cast<const char*>(words.data() + at), size);
    at += (size + 7) / 8;
  }
  void list(auto& items, const auto& each) {
    std::size_t size = 0;
    number(size);
    need(size);  // a word at least for each
    items.resize(size);
    for (auto& item : items) each(item);
  }
  void need(std::size_t count) const {
    MOESH_CHECK(count <= words.size() - at, "the record of a rank ends after ", words.size(),
                " words, in the middle of something");
  }
};

// Writes a record as words, or reads it.
void go_through(auto& w, auto& r) {
  w.number(r.begin), w.number(r.machine), w.number(r.process);
  w.list(r.timeline.names, [&](auto& name) { w.text(name); });
  w.list(r.timeline.groups, [&](auto& g) {
    w.text(g.name), w.number(g.meets_on_host);
    w.list(g.members, [&](auto& rank) { w.number(rank); });
  });
  w.list(r.timeline.slices, [&](auto& s) {
    w.number(s.kind), w.number(s.name), w.number(s.begin), w.number(s.end);
    w.number(s.collective), w.number(s.lane);
  });
  w.list(r.timeline.collectives, [&](auto& c) {
    w.number(c.op), w.number(c.group), w.number(c.bytes), w.number(c.begin);
    w.number(c.wait_begin), w.number(c.end), w.number(c.scope), w.number(c.lane);
  });
  w.list(r.kernels, [&](auto& k) {
    w.text(k.name), w.number(k.device), w.number(k.stream), w.number(k.rank), w.number(k.begin);
    w.number(k.end), w.number(k.lane);
  });
}

// The kernel that runs here, which is whose clock this is; no two have the same id.
std::int64_t machine_number() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return static_cast<std::int64_t>(std::hash<std::string>{}(id));
}

void give_to_ranks(std::vector<RankRecord>& all) {
  std::vector<std::vector<KernelSpan>> given(all.size());
  for (std::size_t r = 0; r < all.size(); ++r)
    for (KernelSpan& k : all[r].kernels) {
      const auto rank = static_cast<std::size_t>(k.rank);
      const bool is_known = k.rank >= 0 && rank < all.size() &&
                            all[rank].machine == all[r].machine &&
                            all[rank].process == all[r].process;
      given[is_known ? rank : r].push_back(std::move(k));
    }
  for (std::size_t r = 0; r < all.size(); ++r) all[r].kernels = std::move(given[r]);
}

}  // namespace

RankRecord here_and_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return {.begin = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(),
          .machine = machine_number(),
          .process = ::getpid()};
}

std::vector<std::int64_t> to_words(const RankRecord& record) {
  WordWriter to;
  go_through(to, record);
  return std::move(to.words);
}

RankRecord from_words(const std::vector<std::int64_t>& words) {
  WordReader from{words};
  RankRecord record;
  go_through(from, record);
  MOESH_CHECK(from.at == words.size(), "the record of a rank has ", words.size(),
              " words, and more than it says");
  return record;
}

std::vector<RankRecord> gather(comm::Group& world, const RankRecord& mine) {
  const comm::ObserverPause quiet;
  const auto options = at::TensorOptions(world.control_device()).dtype(at::kLong);
  std::vector<std::int64_t> words = to_words(mine);
  const at::Tensor sizes =
      world.all_gather(at::full({1}, static_cast<std::int64_t>(words.size()), options)).cpu();
  // One rank after the other: all of a large world at once would be more than a host holds.
  std::vector<RankRecord> all;
  for (int r = 0; r < world.size(); ++r) {
    const std::int64_t size = sizes.const_data_ptr<std::int64_t>()[r];
    at::Tensor sent = at::empty({size}, at::kLong);
    if (r == world.rank())
      std::memcpy(sent.mutable_data_ptr(), words.data(), words.size() * sizeof(std::int64_t));
    const at::Tensor got = world.broadcast(sent.to(options.device()), r).cpu();
    if (world.rank() != 0) continue;
    const auto* p = got.const_data_ptr<std::int64_t>();
    all.push_back(from_words({p, p + size}));
  }
  give_to_ranks(all);
  return all;
}

}  // namespace moesh::train
