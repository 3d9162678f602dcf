#include "moesh/train/timeline/kernels.h"

#include <ATen/record_function.h>
#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <utility>

namespace moesh::train {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::atomic<bool> is_taken = false;

// The operators are what a kernel is linked with, and they know their thread.
const std::set<ActivityType> kActivities{ActivityType::CPU, ActivityType::CUDA};

torch::profiler::impl::ProfilerConfig profiler_config() {
  torch::profiler::impl::ExperimentalConfig options;
  options.profile_all_threads = true;
  return torch::profiler::impl::ProfilerConfig(
      torch::profiler::impl::ProfilerState::KINETO, /*report_input_shapes=*/false,
      /*profile_memory=*/false, /*with_stack=*/false, /*with_flops=*/false,
      /*with_modules=*/false, options);
}

bool is_on_gpu(const kineto::KinetoEvent& e) {
  const auto type = static_cast<libkineto::ActivityType>(e.activityType());
  return type == libkineto::ActivityType::CONCURRENT_KERNEL ||
         type == libkineto::ActivityType::GPU_MEMCPY || type == libkineto::ActivityType::GPU_MEMSET;
}

// Kineto's times are those of the system's clock.
std::int64_t steady_minus_system() {
  const auto ns = [](auto clock) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(clock.time_since_epoch()).count();
  };
  return ns(std::chrono::steady_clock::now()) - ns(std::chrono::system_clock::now());
}

}  // namespace

std::int64_t thread_number() {
  return static_cast<std::int64_t>(at::RecordFunction::currentThreadId());
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
  std::map<std::uint64_t, std::int64_t> threads;  // by the operator's correlation
  for (const auto& e : result->events())
    if (!is_on_gpu(e) && e.deviceType() == c10::DeviceType::CPU && e.correlationId() != 0)
      threads.emplace(e.correlationId(), static_cast<std::int64_t>(e.startThreadId()));
  std::vector<KernelSpan> kernels;
  std::map<std::int64_t, std::int64_t> thread_of_stream;  // each rank has its own
  for (const auto& e : result->events()) {
    if (!is_on_gpu(e)) continue;
    KernelSpan k{.name = e.name(),
                 .stream = e.deviceResourceId(),
                 .begin = static_cast<std::int64_t>(e.startNs()) + shift,
                 .end = static_cast<std::int64_t>(e.endNs()) + shift};
    if (const auto found = threads.find(e.linkedCorrelationId()); found != threads.end())
      k.thread = thread_of_stream[k.stream] = found->second;
    kernels.push_back(std::move(k));
  }
  // A launch outside of every operator has no link.
  for (KernelSpan& k : kernels)
    if (const auto found = thread_of_stream.find(k.stream);
        k.thread < 0 && found != thread_of_stream.end())
      k.thread = found->second;
  return kernels;
}

RecordKernels::~RecordKernels() {
  if (!is_recording_) return;
  kineto::disableProfiler();
  is_taken = false;
}

}  // namespace moesh::train
