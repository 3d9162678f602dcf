#pragma once
// Where the records of a run go. A sink is a class, and a line in open_sinks.

#include <memory>
#include <vector>

#include "moesh/config/config.h"
#include "moesh/train/metrics/record.h"
#include "moesh/train/metrics/run_folder.h"

namespace moesh::train {

/// Rank 0 alone has sinks.
class MetricSink {
 public:
  MetricSink() = default;
  virtual ~MetricSink() = default;
  MetricSink(const MetricSink&) = delete;
  MetricSink& operator=(const MetricSink&) = delete;

  /// One call a step, in order.
  virtual void write(const StepRecord& record) = 0;
  /// After the last step.
  virtual void finish() = 0;
};

using MetricSinks = std::vector<std::unique_ptr<MetricSink>>;

/// The sinks that a configuration asks for.
MetricSinks open_sinks(const config::Config& config, const RunFacts& facts);

}  // namespace moesh::train
