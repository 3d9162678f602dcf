#pragma once
#include <cstdint>
#include <string>

namespace moesh::train {

/// Of the text of a metrics.jsonl called `name`, the lines of steps up to `last_step`: a run that
/// goes on from there writes the others anew. What is no such line, as one that was cut off, goes.
std::string kept_lines(const std::string& text, const std::string& name, std::int64_t last_step);

}  // namespace moesh::train
