#include "moesh/train/metrics/sink.h"

#include <sys/ioctl.h>
#include <unistd.h>

namespace moesh::train {
namespace {

std::vector<std::string> validation_names(const config::Config& config) {
  std::vector<std::string> names;
  for (const auto& source : config.validation.source)
    names.push_back(source.name.empty() ? source.path : source.name);
  return names;
}

}  // namespace

MetricSinks open_sinks(const config::Config& config, const RunFacts& facts) {
  MetricSinks sinks;
  if (const std::string& folder = config.metrics.folder; !folder.empty()) {
    sinks.push_back(std::make_unique<JsonlSink>(folder, facts.first_step));
    describe_start(config, facts);
    if (config.metrics.enable_csv)
      sinks.push_back(
          std::make_unique<CsvSink>(folder, facts.first_step, validation_names(config)));
    if (config.metrics.enable_tensorboard)
      sinks.push_back(std::make_unique<TensorBoardSink>(folder, facts.first_step));
  }
  if (!config.metrics.quiet)
    sinks.push_back(std::make_unique<ConsoleSink>(console_options(config, facts.first_step)));
  return sinks;
}

}  // namespace moesh::train
