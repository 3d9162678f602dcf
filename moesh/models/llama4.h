#pragma once
// Llama 4 (text): scores multiply what goes into an expert, one expert a token beside a shared one.
// Most layers rotate and see their own chunk; every so often one has no positions and sees all,
// with queries that grow.

#include <optional>
#include <string>
#include <vector>

#include "moesh/models/config.h"
#include "moesh/models/decoder.h"

namespace moesh::models {

struct Llama4Config : GroupedDecoderConfig {
  static constexpr const char* kName = "llama4";
  static constexpr const char *kModelType = "llama4_text",
                              *kArchitecture = "Llama4ForCausalLM";  // in config.json

  std::int64_t ffn = 48;      // of the layers that are not mixtures
  std::int64_t moe_step = 1;  // every so many layers one is a mixture,
  std::optional<std::vector<std::int64_t>> moe_layers = {};  // or these are
  std::int64_t nope_step = 4;  // every so many layers one has no positions,
  std::optional<std::vector<std::int64_t>> nope_layers = {};  // or these have none
  std::int64_t chunk = 8192;  // of the layers with positions; 0: none
  bool qk_norm = true;        // of the layers with positions
  double growth = 0.1;        // of the queries of the others; 0: none
  std::int64_t growth_floor = 8192;

  /// "tiny", "debug", "scout" (17B x 16E), "maverick" (17B x 128E).
  static std::vector<BuiltIn<Llama4Config>> built_in();
  static Llama4Config named(const std::string& size) {
    return models::built_in<Llama4Config>(size);
  }

  bool is_moe(std::int64_t layer) const;
  bool has_positions(std::int64_t layer) const;

  ModelKeys keys();
  DecoderPlan plan() const;
};

}  // namespace moesh::models
