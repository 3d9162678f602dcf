#pragma once
// JSONL: one JSON object a line, such as {"text": "..."}. Built on nlohmann/json where it was
// found, see has_json().

#include <functional>
#include <istream>
#include <string>

namespace moesh::formats {

/// Whether this build reads JSON; without nlohmann/json every call below throws and says so.
bool has_json();

/// Calls `f` with the text under `key` of every line, in order; blank lines are passed over. Errors
/// (data) begin with "name:line:".
void each_json_text(std::istream& lines, const std::string& name, const std::string& key,
                    const std::function<void(const std::string& text)>& f);

}  // namespace moesh::formats
