#pragma once
// What is recorded on a rank: the kernels and copies of the GPU, by LibTorch's profiler (Kineto),
// collectives and operators; and the records of all ranks, collected on rank 0.

#include <ATen/record_function.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "moesh/base/this_thread.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/group.h"

namespace moesh::train {

/// A kernel, or a copy of memory.
struct KernelSpan {
  std::string name;
  std::int64_t device = 0;  // index of the GPU: each numbers its streams by itself
  std::int64_t stream = 0;
  std::int64_t rank = -1;           // for which it was launched; -1: unknown
  std::int64_t begin = 0, end = 0;  // as those of a Slice
  std::int64_t lane = 0;            // likewise
};

/// Whether it only takes the time of a slow link (comm/paced.h): the GPU does nothing.
bool is_of_link(const KernelSpan& kernel);

/// The events of the profiler that are used.
struct ProfilerEvent {
  enum class EventSource : std::uint8_t {
    op,      // of LibTorch, on the host
    launch,  // a call of the CUDA runtime or driver, on the host
    kernel,  // on the device
  };
  EventSource kind = EventSource::op;
  std::string name;
  std::int64_t device = 0;        // of a kernel
  std::int64_t place = 0;         // of a kernel its stream; else the number of its thread
  std::uint64_t correlation = 0;  // of a kernel and its launch; ops have theirs; 0: none
  std::uint64_t op = 0;           // the correlation of the op that launched a kernel; 0: none
  std::int64_t begin = 0, end = 0;
};

/// The kernels among them, by rank and lane. A kernel belongs to what the thread whose op launched
/// it works for, or the thread that launched it. If neither is known, it belongs to the rank that
/// has all other kernels of its stream.
std::vector<KernelSpan> kernels_of(const std::vector<ProfilerEvent>& events,
                                   const std::function<RankLane(std::int64_t thread)>& work_of);

/// Before the ranks are started, in the thread that loaded the program: the profiler wants it.
void prepare_kernels();

/// While it lives, records the kernels of this process. The profiler is one for all threads: the
/// first of several objects records, and the others nothing.
class RecordKernels {
 public:
  RecordKernels();
  ~RecordKernels();
  RecordKernels(const RecordKernels&) = delete;
  RecordKernels& operator=(const RecordKernels&) = delete;

  /// The events of all threads; call it once, when the device is done.
  std::vector<KernelSpan> take();

 private:
  KeepRankThreads threads_;
  bool is_recording_;
};

// The collectives of a rank, in its Timeline.

/// While it lives, every collective that this thread starts is in the timeline.
class RecordCollectives final : public comm::ThreadObserver {
 public:
  explicit RecordCollectives(Timeline& timeline) : timeline_(timeline) {}

  void called(const comm::Operation& operation) override;
  void started(std::int64_t number) override;
  void waits(std::int64_t number) override;
  void ended(std::int64_t number) override;

 private:
  Timeline& timeline_;
  std::map<std::int64_t, std::int64_t> numbers_;  // in the timeline, of what has not ended
};

// The operators of LibTorch, in the Timeline of a rank.

/// While it lives, every operator of this thread is a slice of its Timeline, including backward,
/// which runs in the thread of the rank. LibTorch's own profiler knows threads, not ranks; here
/// slices need not be assigned to ranks afterwards, and have the same clock as all others.
class RecordOperators {
 public:
  RecordOperators();
  ~RecordOperators();
  RecordOperators(const RecordOperators&) = delete;
  RecordOperators& operator=(const RecordOperators&) = delete;

 private:
  at::CallbackHandle handle_;
};

// Collects the records of all ranks on rank 0.

/// The record of a rank, and where it ran.
struct RankRecord {
  std::int64_t begin = 0;    // of the recording
  std::int64_t machine = 0;  // the same number: the same clock
  std::int64_t process = 0;
  TimelineRecord timeline;
  std::vector<KernelSpan> kernels;  // of the process, in the record of one of its ranks
};

/// The rank that calls it, and when.
RankRecord here_and_now();

/// As whole numbers, which every backend sends; and back, or an Error (internal).
std::vector<std::int64_t> to_words(const RankRecord& record);
RankRecord from_words(const std::vector<std::int64_t>& words);

/// The records by rank, only on rank 0; nothing on the others. Kernels are with the rank for
/// which they were launched, and if that is unknown, with the rank that recorded them.
std::vector<RankRecord> gather(comm::Group& world, const RankRecord& mine);

}  // namespace moesh::train
