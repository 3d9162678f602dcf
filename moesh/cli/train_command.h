#pragma once
// moesh train, for the command and for programs that embed it.

#include "moesh/config/config.h"
#include "moesh/data/dataset.h"
#include "moesh/train/loop.h"

namespace moesh::cli {

/// Trains, on data of the caller's own where some is given. A size that does not fit into memory is
/// an Error (config) which names it, before anything is computed if that can be known.
train::RunSummary train_in_memory(const config::Config& config, train::CallerInfo caller = {},
                                  const data::Dataset* dataset = nullptr);

}  // namespace moesh::cli
