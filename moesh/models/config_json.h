#pragma once
// config.json of transformers: each model names its fields once, to be read and to be written.

#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/json.h"
#include "moesh/models/config.h"

namespace moesh::models {

struct DeepseekMoe;

using formats::JsonList;
using formats::JsonObject;
using formats::JsonValue;

/// Fields that go from a file into a configuration, or from a configuration into `written`. A field
/// that is absent or null stands for `fallback`.
class ConfigJson {
 public:
  /// Writes.
  ConfigJson() = default;
  /// Reads.
  explicit ConfigJson(JsonValue from) : from_(std::move(from)) {}

  bool reads() const { return from_.has_value(); }
  const JsonValue& from() const { return *from_; }
  /// The value in the file; nothing if it is absent or null.
  std::optional<JsonValue> find(const std::string& key) const;
  JsonObject& written() { return written_; }
  void write(const std::string& key, JsonValue value) {
    written_.emplace_back(key, std::move(value));
  }

  /// A whole number; without `fallback` it must be there.
  void count(const std::string& key, std::int64_t& value, std::optional<std::int64_t> fallback = {},
             std::int64_t least = 1, std::int64_t most = 1'000'000'000);
  /// A whole number where null stands for 0, and an absent field for `absent`.
  void count_or_null(const std::string& key, std::int64_t& value, std::int64_t absent = 0);
  void number(const std::string& key, double& value, double fallback, double least = 0,
              double most = 1e9);
  /// A number that is written unless it is 0.
  void number_if_any(const std::string& key, double& value);
  void flag(const std::string& key, bool& value, bool fallback);
  /// Whole numbers; none where it is absent.
  void list(const std::string& key, std::vector<std::int64_t>& values);
  /// Variants that moesh does not compute: better an error than other numbers. An absent field is
  /// fine.
  void require(const std::string& key, const JsonValue& wanted) const;
  /// The same, and the one value of it is written.
  void only(const std::string& key, const JsonValue& wanted);

 private:
  std::optional<JsonValue> from_;
  JsonObject written_;
};

/// Values of absent fields, and the name of the number of experts.
struct JsonDefaults {
  double theta = 10000, norm_eps = 1e-6;
  std::int64_t head_dim = 0;  // 0: the width divided by the heads
  nn::RopeConfig rope = {};   // where nothing is said of scaling
  // Rotated part of each head; not given: the model rotates all of it, and moesh reads nothing
  // else.
  std::optional<double> rotated = {};
  const char* num_experts = "num_local_experts";  // read under any of its names
};

void decoder_fields(ConfigJson& json, const JsonDefaults& defaults, DecoderConfig& config);
void grouped_fields(ConfigJson& json, const JsonDefaults& defaults, GroupedDecoderConfig& config);
/// An absent field keeps the value that `moe` has; but there must be a dense width, and the
/// number of dense layers.
void moe_fields(ConfigJson& json, std::int64_t num_layers, DeepseekMoe& moe);

}  // namespace moesh::models
