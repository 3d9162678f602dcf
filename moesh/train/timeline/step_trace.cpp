#include "moesh/train/timeline/step_trace.h"

#include <filesystem>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/timeline.h"
#include "moesh/base/version.h"
#include "moesh/checkpoint/file.h"
#include "moesh/config/options.h"
#include "moesh/train/timeline/costs.h"
#include "moesh/train/timeline/gather.h"
#include "moesh/train/timeline/kernels.h"
#include "moesh/train/timeline/trace_file.h"

namespace moesh::train {

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
