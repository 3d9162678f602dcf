#include "moesh/models/disk.h"
#include "moesh/models/disk_json.h"

namespace moesh::models {

void read(const JsonValue& json, Llama4Config& c) {
  read_grouped(json, {.theta = 5e5, .norm_eps = 1e-5, .head_dim = 128}, c);
  c.attention_bias = flag(json, "attention_bias", false);
  c.moe_ffn = count(json, "intermediate_size"), c.ffn = count(json, "intermediate_size_mlp");
  c.moe_step = count(json, "interleave_moe_layer_step", 1);
  c.moe_layers = numbers(json, "moe_layers");
  c.nope_step = count(json, "no_rope_layer_interval", 4);
  // The list says of each layer whether it has positions; an empty one is none.
  if (const auto has_rope = numbers(json, "no_rope_layers"); has_rope && !has_rope->empty()) {
    MOESH_CHECK(has_rope->size() >= static_cast<size_t>(c.num_layers), ErrorKind::data,
                "no_rope_layers has ", has_rope->size(),
                " numbers for num_hidden_layers = ", c.num_layers);
    c.nope_layers.emplace();
    for (std::int64_t i = 0; i < c.num_layers; ++i)
      if ((*has_rope)[static_cast<size_t>(i)] == 0) c.nope_layers->push_back(i);
  }
  c.chunk = field(json, "attention_chunk_size") ? count(json, "attention_chunk_size") : 0;
  if (!json.find("attention_chunk_size")) c.chunk = 8192;
  JsonList types;
  for (std::int64_t i = 0; i < c.num_layers; ++i)
    types.emplace_back(c.has_positions(i) ? "chunked_attention" : "full_attention");
  require(json, "layer_types", {types});
  c.qk_norm = flag(json, "use_qk_norm", true);
  // Some folders have a number here.
  const auto tuning = field(json, "attn_temperature_tuning");
  const bool grows =
      !tuning || !(*tuning == JsonValue{false} || *tuning == JsonValue{std::int64_t{0}});
  c.growth = grows ? number(json, "attn_scale", 0.1) : 0;
  c.growth_floor = count(json, "floor_scale", 8192);
}

JsonObject fields(const Llama4Config& c) {
  std::vector<std::int64_t> moe, rope;
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    if (c.is_moe(i)) moe.push_back(i);
    rope.push_back(c.has_positions(i) ? 1 : 0);
  }
  const JsonValue chunk = c.chunk > 0 ? JsonValue{c.chunk} : JsonValue{};
  return joined(grouped_json(c), {{"attention_bias", {c.attention_bias}},
                                  {"intermediate_size", {c.moe_ffn}},
                                  {"intermediate_size_mlp", {c.ffn}},
                                  {"num_local_experts", {c.num_experts}},
                                  {"interleave_moe_layer_step", {c.moe_step}},
                                  {"moe_layers", {to_list(moe)}},
                                  {"no_rope_layer_interval", {c.nope_step}},
                                  {"no_rope_layers", {to_list(rope)}},
                                  {"attention_chunk_size", chunk},
                                  {"use_qk_norm", {c.qk_norm}},
                                  {"attn_temperature_tuning", {c.growth != 0}},
                                  {"attn_scale", {c.growth}},
                                  {"floor_scale", {c.growth_floor}}});
}

std::vector<formats::DiskTensor> tensors(const Llama4Config&, const LayerExperts& x,
                                         formats::ExpertLayout) {
  return stacked_in_out(x, /*interleaved=*/false);
}

}  // namespace moesh::models
