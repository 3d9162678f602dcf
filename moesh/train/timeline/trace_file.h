#pragma once
// The records of the ranks as a file that Perfetto (https://ui.perfetto.dev) and Chrome
// (chrome://tracing) open: Chrome's trace event format.

#include <string>
#include <utility>
#include <vector>

#include "moesh/train/timeline/costs.h"
#include "moesh/train/timeline/gather.h"

namespace moesh::train {

/// Each rank is a "process", with a track "host" (steps, sections, operators and collectives, each
/// within what it is part of), one for every stream of the device, and the collectives from call to
/// end, which may go on beside each other. `about` are texts about the run, for its "otherData".
std::string trace_json(const std::vector<RankRecord>& records,
                       const std::vector<std::vector<Wait>>& waits,
                       const std::vector<std::pair<std::string, std::string>>& about);

}  // namespace moesh::train
