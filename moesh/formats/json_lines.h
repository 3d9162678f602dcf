#pragma once
// JSONL: one JSON object a line, such as {"text": "..."}.

#include <functional>
#include <istream>
#include <string>
#include <string_view>

namespace moesh::formats {

constexpr std::size_t kMaxLineBytes = std::size_t{64} << 20;

/// The text under `key` of a line, which is one object. Errors (data) begin with `where`.
std::string text_of_json_line(std::string_view line, const std::string& where,
                              const std::string& key);

/// Calls `f` with the text under `key` of every line, in order; blank lines are skipped. Errors
/// (data) begin with "name:line:".
void each_json_text(std::istream& lines, const std::string& name, const std::string& key,
                    const std::function<void(const std::string& text)>& f);

}  // namespace moesh::formats
