#pragma once
// A record as named numbers, for sinks that know nothing else.

#include <string>
#include <utility>
#include <vector>

#include "moesh/train/metrics/record.h"

namespace moesh::train {

using Scalars = std::vector<std::pair<std::string, double>>;

/// Under the tags of torchtitan's event files where it has them, and in their manner for the rest.
Scalars scalars_of(const StepRecord& record);

}  // namespace moesh::train
