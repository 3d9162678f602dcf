#pragma once
// Reading and writing config.json: what all models have in common.

#include <optional>
#include <string>
#include <vector>

#include "moesh/formats/json.h"
#include "moesh/models/config.h"

namespace moesh::models {

using formats::JsonList;
using formats::JsonObject;
using formats::JsonValue;

/// A field that may be absent or null.
std::optional<JsonValue> field(const JsonValue& json, const std::string& key);
/// A whole number, 1 or more; without `fallback` it must be there.
std::int64_t count(const JsonValue& json, const std::string& key,
                   std::optional<std::int64_t> fallback = {});
/// A number of such a range; `fallback` where it is absent.
double number(const JsonValue& json, const std::string& key, double fallback, double least = 0,
              double most = 1e9);
bool flag(const JsonValue& json, const std::string& key, bool fallback);
std::optional<std::vector<std::int64_t>> numbers(const JsonValue& json, const std::string& key);
JsonList to_list(const std::vector<std::int64_t>& values);
/// Variants that moesh does not compute: better an error than other numbers. An absent field is
/// fine.
void require(const JsonValue& json, const std::string& key, const JsonValue& wanted);

/// What a field stands for where it is absent.
struct JsonDefaults {
  double theta = 10000, norm_eps = 1e-6;
  std::int64_t head_dim = 0;  // 0: the width divided by the heads
  nn::RopeConfig rope = {};   // where nothing is said of scaling
};

void read_decoder(const JsonValue& json, const JsonDefaults& defaults, DecoderConfig& config);
void read_grouped(const JsonValue& json, const JsonDefaults& defaults,
                  GroupedDecoderConfig& config);
JsonObject decoder_json(const DecoderConfig& config);
JsonObject grouped_json(const GroupedDecoderConfig& config);

/// Puts more fields behind those that are there.
JsonObject joined(JsonObject fields, const JsonObject& more);

}  // namespace moesh::models
