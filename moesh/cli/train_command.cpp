#include "moesh/cli/train_command.h"

#include "moesh/cli/memory_errors.h"
#include "moesh/comm/launch.h"
#include "moesh/estimate/estimate.h"
#include "moesh/kernels/memory.h"
#include "moesh/train/memory.h"

namespace moesh::cli {

using namespace config;
using namespace train;
namespace {

// Bytes of the rank that holds the most, at its peak; what cannot be estimated may still be
// trained.
std::optional<std::int64_t> expected_memory(const Config& config) {
  try {
    return estimate::estimate(config).peak;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

RunSummary train_in_memory(const Config& config, CallerInfo caller, const data::Dataset* dataset) {
  // Under a launcher the ranks are spread over the processes.
  const int processes = comm::num_launched_processes();
  if (processes > 0 && mesh_shape(config).num_ranks() % processes != 0) validate(config, processes);
  if (config.training.device == "cpu") kernels::keep_freed_memory();
  RunSummary summary;
  naming_sizes(config, [&] {
    check_fits(config);
    caller.estimated_memory = expected_memory(config);
    if (config.training.device == "cpu") caller.memory_before_gib = peak_memory_gib("cpu");
    summary = dataset ? train::train(config, *dataset, caller) : train::train(config, caller);
  });
  return summary;
}

}  // namespace moesh::cli
