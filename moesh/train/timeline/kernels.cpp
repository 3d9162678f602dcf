#include "moesh/train/timeline/kernels.h"

#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

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

}  // namespace moesh::train
