#include "moesh/train/metrics/sink.h"

#include <unistd.h>

#include <chrono>
#include <string>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/file.h"
#include "moesh/train/metrics/event_file.h"
#include "moesh/train/metrics/record.h"

namespace moesh::train {

using namespace event_file;

TensorBoardSink::TensorBoardSink(const std::filesystem::path& folder, std::int64_t first_step)
    : folder_(folder / "tensorboard") {
  checkpoint::make_folders(folder_);
  begin(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(),
        first_step);
}

// TensorBoard reads the files in the order of their names, which begin with the time.
void TensorBoardSink::begin(double time, std::int64_t first_step) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  file_ =
      AppendFile(folder_ / detail::concat("events.out.tfevents.", static_cast<std::int64_t>(time),
                                          ".", host, ".", getpid(), ".", num_files_++));
  std::string bytes = record(version_event(time));
  if (first_step > 0) bytes += record(restart_event(time, first_step + 1));
  is_broken_ = !file_.write(bytes, first_step);
}

void TensorBoardSink::write(const StepRecord& r) {
  if (is_broken_) {
    try {
      begin(r.time, r.step - 1);
    } catch (const Error&) {
      return;  // it was reported
    }
  }
  if (!is_broken_)
    is_broken_ = !file_.write(record(scalars_event(r.time, r.step, scalars_of(r))), r.step);
}

}  // namespace moesh::train
