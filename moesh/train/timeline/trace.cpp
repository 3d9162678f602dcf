#include "moesh/train/timeline/trace.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <tuple>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/base/timeline.h"
#include "moesh/base/version.h"
#include "moesh/checkpoint/file.h"
#include "moesh/config/options.h"
#include "moesh/formats/json.h"
#include "moesh/train/timeline/costs.h"

namespace moesh::train {

namespace {

using formats::json_quoted;

constexpr int kHost = 0;  // track of a rank; its other lanes follow, and streams

const char* to_string(SliceKind kind) {
  switch (kind) {
    case SliceKind::step: return "step";
    case SliceKind::section: return "section";
    case SliceKind::scope: return "scope";
    case SliceKind::op: return "operator";
    case SliceKind::collective: return "collective";
    case SliceKind::turn: return "turn";
  }
  return "unknown";
}

std::string micros(std::int64_t nanoseconds) {
  return formatted("%.3f", static_cast<double>(nanoseconds) / 1e3);
}

class Events {
 public:
  std::string text;

  /// `members` are further ones, ready: ,"name":"x"
  void add(char phase, std::size_t rank, int track, const std::string& members) {
    text += detail::concat(text.empty() ? "" : ",\n", R"({"ph":")", phase, R"(","pid":)", rank,
                           R"(,"tid":)", track, members, "}");
  }
  void name(const char* what, std::size_t rank, int track, const std::string& name) {
    add('M', rank, track,
        detail::concat(R"(,"name":")", what, R"(","args":{"name":)", json_quoted(name), "}"));
  }
};

std::string arguments(const TimelineRecord& t, const CollectiveSpan& c, const Wait& wait) {
  const TimelineGroup& g = t.groups.at(static_cast<std::size_t>(c.group));
  std::string text = detail::concat(R"(,"args":{"axes":)", json_quoted(g.name), R"(,"ranks":)",
                                    g.members.size(), R"(,"bytes":)", c.bytes);
  if (wait.unknown.empty())
    text += detail::concat(R"(,"waited_us":)", micros(wait.nanoseconds), R"(,"slowest_rank":)",
                           wait.slowest);
  else
    text += R"(,"waited":)" + json_quoted("unknown: " + wait.unknown);
  if (c.scope >= 0)
    text += R"(,"in":)" + json_quoted(t.names.at(static_cast<std::size_t>(c.scope)));
  return text + "}";
}

std::string when(std::int64_t begin, std::int64_t end) {
  return detail::concat(R"(,"ts":)", micros(begin), R"(,"dur":)", micros(end - begin));
}

// Each lane is a track. Returns how many there are.
int add_host(Events& events, std::size_t rank, const RankRecord& record,
             const std::vector<Wait>& waits, std::int64_t zero) {
  const TimelineRecord& t = record.timeline;
  const std::map<std::size_t, std::int64_t> idle = idle_after_counts(record);
  int num_lanes = 1;
  for (std::size_t i = 0; i < t.slices.size(); ++i) {
    const Slice& s = t.slices[i];
    std::string members =
        detail::concat(when(s.begin - zero, s.end - zero), R"(,"cat":")", to_string(s.kind),
                       R"(","name":)", json_quoted(t.names.at(static_cast<std::size_t>(s.name))));
    if (const auto c = static_cast<std::size_t>(s.collective); s.collective >= 0)
      members += arguments(t, t.collectives.at(c), waits.at(c));
    if (const auto found = idle.find(i); found != idle.end())
      members += detail::concat(R"(,"args":{"gpu_idle_us":)", micros(found->second), "}");
    const int lane = static_cast<int>(s.lane);
    events.add('X', rank, kHost + lane, members);
    for (; num_lanes <= lane; ++num_lanes)
      events.name("thread_name", rank, kHost + num_lanes, detail::concat("host, lane ", num_lanes));
  }
  return num_lanes;
}

void add_collectives(Events& events, std::size_t rank, const TimelineRecord& t,
                     const std::vector<Wait>& waits, std::int64_t zero) {
  for (std::size_t i = 0; i < t.collectives.size(); ++i) {
    const CollectiveSpan& c = t.collectives[i];
    const std::string name = t.names.at(static_cast<std::size_t>(c.op)) + " " +
                             t.groups.at(static_cast<std::size_t>(c.group)).name;
    const std::string same = detail::concat(R"(,"cat":"in progress","id":")", rank, ".", i,
                                            R"(","name":)", json_quoted(name));
    const int track = kHost + static_cast<int>(c.lane);
    events.add(
        'b', rank, track,
        detail::concat(R"(,"ts":)", micros(c.begin - zero), same, arguments(t, c, waits[i])));
    events.add('e', rank, track, detail::concat(R"(,"ts":)", micros(c.end - zero), same));
  }
}

void add_kernels(Events& events, std::size_t rank, const std::vector<KernelSpan>& kernels,
                 int first_track, std::int64_t zero) {
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, int>
      tracks;  // by device, stream and lane
  for (const KernelSpan& k : kernels) {
    const auto [found, is_new] = tracks.emplace(std::tuple{k.device, k.stream, k.lane},
                                                first_track + static_cast<int>(tracks.size()));
    if (is_new)
      events.name("thread_name", rank, found->second,
                  detail::concat("GPU ", k.device, " stream ", k.stream,
                                 k.lane > 0 ? detail::concat(", lane ", k.lane) : ""));
    events.add('X', rank, found->second,
               detail::concat(when(k.begin - zero, k.end - zero), R"(,"cat":"kernel","name":)",
                              json_quoted(k.name)));
  }
}

}  // namespace

std::string trace_json(const std::vector<RankRecord>& records,
                       const std::vector<std::vector<Wait>>& waits,
                       const std::vector<std::pair<std::string, std::string>>& about) {
  std::map<std::int64_t, std::int64_t> zeros;  // by machine: its clock when the recording began
  for (const RankRecord& r : records) {
    const auto [found, is_new] = zeros.emplace(r.machine, r.begin);
    if (!is_new) found->second = std::min(found->second, r.begin);
  }
  Events events;
  for (std::size_t r = 0; r < records.size(); ++r) {
    const std::int64_t zero = zeros.at(records[r].machine);
    events.name("process_name", r, kHost, detail::concat("rank ", r));
    events.add('M', r, kHost,
               detail::concat(R"(,"name":"process_sort_index","args":{"sort_index":)", r, "}"));
    events.name("thread_name", r, kHost, "host");
    const int num_lanes = add_host(events, r, records[r], waits[r], zero);
    add_collectives(events, r, records[r].timeline, waits[r], zero);
    add_kernels(events, r, records[r].kernels, kHost + num_lanes, zero);
  }
  std::string other =
      R"("clock":)" + json_quoted(zeros.size() == 1
                                      ? "one for all ranks"
                                      : detail::concat("that of each of ", zeros.size(),
                                                       " machines, from the begin of the recording "
                                                       "on: times of two machines do not compare"));
  for (const auto& [key, value] : about) other += "," + json_quoted(key) + ":" + json_quoted(value);
  return detail::concat("{\"displayTimeUnit\":\"ms\",\"otherData\":{", other,
                        "},\n\"traceEvents\":[\n", events.text, "\n]}\n");
}

struct StepTrace::Recording {
  explicit Recording(bool has_kernels) {
    if (has_kernels) kernels.emplace();
  }
  RankRecord record = here_and_now();
  std::optional<RecordKernels> kernels;
  Timeline timeline;
  RecordCollectives collectives{timeline};
  RecordOperators operators;
  std::int64_t step = 0;  // the slice of the step that is going on
};

StepTrace::StepTrace(const config::Config& config, comm::Group& world, std::int64_t first_step)
    : config_(config), world_(world), steps_(config::profile_steps(config)) {
  if (!steps_ || first_step < steps_->last) return;
  if (world.rank() == 0)
    log_warn(describe_option(config, "profile.steps"), ", and the run resumes after step ",
             first_step, ": there will be no trace");
  steps_.reset();
}

StepTrace::~StepTrace() = default;

void StepTrace::begin_step(std::int64_t step) {
  if (!steps_ || step < steps_->first) return;
  if (!recording_) {
    const comm::ObserverPause quiet;
    first_recorded_ = step;
    const bool has_kernels = config_.training.device == "cuda";
    world_.barrier();  // so that no rank starts late
    recording_ = std::make_unique<Recording>(has_kernels);
    if (has_kernels) world_.barrier();  // the profiler is on, for all threads of a process
  }
  recording_->step = recording_->timeline.open(SliceKind::step, detail::concat("step ", step));
}

void StepTrace::end_step() {
  if (recording_) recording_->timeline.close(recording_->step);
}

void StepTrace::after_step(std::int64_t step, bool ends) {
  if (recording_ && (ends || step >= steps_->last)) write(step);
}

void StepTrace::write(std::int64_t last_step) {
  RankRecord mine = std::move(recording_->record);
  mine.timeline = recording_->timeline.take();
  if (recording_->kernels) {
    const comm::ObserverPause quiet;
    world_.barrier();  // all threads of this process have come to the end
    mine.kernels = recording_->kernels->take();
  }
  recording_.reset();
  steps_.reset();
  const InSection section(Section::saving);
  const auto records = gather(world_, mine);
  if (world_.rank() != 0) return;
  const auto waits = find_waits(records);
  const std::string steps = detail::concat(first_recorded_, "-", last_step);
  const auto path =
      std::filesystem::path(config_.metrics.folder) / ("trace-steps-" + steps + ".json");
  summary_ = describe(costs_of(records, waits));
  try {
    std::error_code none;
    std::filesystem::remove(path, none);  // of a run that went on from before these steps
    checkpoint::write_file(path, trace_json(records, waits,
                                            {{"moesh", version()},
                                             {"model", model_argument(config_)},
                                             {"mesh", mesh_shape(config_).describe()}}));
  } catch (const Error& e) {  // a run does not end for it
    log_warn("no trace is written: ", e.what());
    return;
  }
  summary_ =
      detail::concat("trace: ", path.string(), "; open it in https://ui.perfetto.dev\n", summary_);
  log_info("the trace of steps ", first_recorded_, " to ", last_step, " is in '", path.string(),
           "'");
}

}  // namespace moesh::train
