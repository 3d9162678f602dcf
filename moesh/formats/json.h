#pragma once
// JSON texts that others wrote (config.json, indexes, headers), as values. Strict: a key that comes
// twice is refused, and so are deep nesting and bytes that are not UTF-8.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <istream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace moesh::formats {

struct JsonValue;
using JsonList = std::vector<JsonValue>;
using JsonObject =
    std::vector<std::pair<std::string, JsonValue>>;  // in the order of the text, every key once

/// A whole number is an int64, or a uint64 where it is too large for one; any other number (1.0,
/// 1e3, -0) is a double.
struct JsonValue {
  std::variant<std::nullptr_t, bool, std::int64_t, std::uint64_t, double, std::string, JsonList,
               JsonObject>
      value = nullptr;

  bool operator==(const JsonValue&) const = default;

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value); }
  /// The value under a key; null where this is not an object or has no such key. Compares
  /// one key after the other.
  const JsonValue* find(std::string_view key) const;

  /// The value as what it must be, or an Error (data) which calls it `what`.
  bool as_bool(std::string_view what) const;
  std::int64_t as_int(std::string_view what) const;
  std::uint64_t as_size(std::string_view what) const;  // a whole number that is not negative
  double as_number(std::string_view what) const;       // whole or not
  const std::string& as_text(std::string_view what) const;
  const JsonList& as_list(std::string_view what) const;
  const JsonObject& as_object(std::string_view what) const;
  /// The value under a key that must be there.
  const JsonValue& at(std::string_view key, std::string_view what) const;
};

struct JsonLimits {
  std::size_t max_bytes = 100'000'000;
  std::size_t max_depth = 127;          // as the reference implementation of safetensors
  std::size_t max_values = 10'000'000;  // a text of [0,0,0,...] must not become gigabytes
};

/// The value of a whole text. `name` is what errors (data) call the text.
JsonValue parse_json(std::string_view text, const std::string& name, const JsonLimits& limits = {});
/// The value in a file; see InputFile for which may be read.
JsonValue read_json(const std::string& path, const JsonLimits& limits = {});

/// The text of a value, indented by two, that parses as the same value. Texts must be UTF-8, and
/// numbers finite.
std::string to_json(const JsonValue& value);
/// The same without blanks on one line, with its end: a line of a JSONL file.
std::string to_json_line(const JsonValue& value);
/// A text as JSON writes it, in quotes; it must be UTF-8.
std::string json_quoted(std::string_view text);

// JSONL: one JSON object a line, such as {"text": "..."}.

constexpr std::size_t kMaxLineBytes = std::size_t{64} << 20;

/// The text under `key` of a line, which is one object. Errors (data) begin with `where`.
std::string text_of_json_line(std::string_view line, const std::string& where,
                              const std::string& key);

/// Calls `f` with the text under `key` of every line, in order; blank lines are skipped. Errors
/// (data) begin with "name:line:".
void each_json_text(std::istream& lines, const std::string& name, const std::string& key,
                    const std::function<void(const std::string& text)>& f);

/// The lines of steps up to `last_step` in the text of a metrics.jsonl called `name`: a run that
/// goes on from there writes the others anew. Anything else, such as a line that was cut off, is
/// dropped.
std::string kept_lines(const std::string& text, const std::string& name, std::int64_t last_step);

}  // namespace moesh::formats
