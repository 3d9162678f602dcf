#include "moesh/train/metrics/sink.h"

#include <unistd.h>

#include "moesh/comm/launch.h"
#include "moesh/train/metrics/console.h"
#include "moesh/train/metrics/jsonl.h"

namespace moesh::train {

MetricSinks open_sinks(const config::Config& config, std::int64_t first_step) {
  MetricSinks sinks;
  if (!config.metrics.folder.empty())
    sinks.push_back(std::make_unique<JsonlSink>(config.metrics.folder, first_step));
  sinks.push_back(std::make_unique<ConsoleSink>(ConsoleOptions{
      .num_steps = config.training.steps,
      .log_freq = config.metrics.log_freq,
      .is_terminal = isatty(STDOUT_FILENO) != 0 && comm::num_launched_processes() == 0}));
  return sinks;
}

}  // namespace moesh::train
