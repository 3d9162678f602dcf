#pragma once
// The message for a size that does not fit into memory.

#include <functional>

#include "moesh/config/config.h"

namespace moesh::cli {

/// Throws Error (config) where the weights, gradients and optimizer of the ranks in this process do
/// not fit into the memory of the machine. To be asked before anything is computed: a machine that
/// is out of memory kills any process.
void check_fits(const config::Config& config);

/// Calls f. Where memory is not enough for it, throws Error (config) with the sizes that were set,
/// the bytes asked for and the bytes there; what else LibTorch throws becomes an Error (internal)
/// without a backtrace.
void naming_sizes(const config::Config& config, const std::function<void()>& f);

}  // namespace moesh::cli
