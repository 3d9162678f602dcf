#pragma once
// The message for a size that does not fit into memory.

#include <functional>

#include "moesh/config/config.h"
#include "moesh/data/dataset.h"
#include "moesh/train/loop.h"

namespace moesh::cli {

/// Throws Error (config) where the weights, gradients and optimizer of the ranks in this process do
/// not fit into the memory of the machine. To be asked before anything is computed: a machine that
/// is out of memory kills any process.
void check_fits(const config::Config& config);

/// Calls f. Where memory is not enough for it, throws Error (config) with the sizes that were set,
/// the bytes asked for and the bytes there; what else LibTorch throws becomes an Error (internal)
/// without a backtrace.
void naming_sizes(const config::Config& config, const std::function<void()>& f);

// moesh train, for the command and for programs that embed it.

/// Trains, on data of the caller's own where some is given. A size that does not fit into memory is
/// an Error (config) which names it, before anything is computed if that can be known.
train::RunSummary train_in_memory(const config::Config& config, train::CallerInfo caller = {},
                                  const data::Dataset* dataset = nullptr);

}  // namespace moesh::cli
