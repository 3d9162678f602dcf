#include "moesh/models/disk.h"
#include "moesh/models/disk_json.h"

namespace moesh::models {

void read(const JsonValue& json, GptOssConfig& c) {
  nn::RopeConfig rope;
  rope.factor = 32, rope.truncate = false;
  read_grouped(json, {.theta = 150000, .norm_eps = 1e-5, .head_dim = 64, .rope = rope}, c);
  require(json, "swiglu_limit", {7.0});
  require(json, "swiglu_alpha", {1.702});
  c.attention_bias = flag(json, "attention_bias", true);
  c.moe_ffn = count(json, "intermediate_size");
  c.window = field(json, "sliding_window") ? count(json, "sliding_window") : 0;
  if (!json.find("sliding_window")) c.window = 128;
  JsonList types;
  for (std::int64_t i = 0; i < c.num_layers; ++i)
    types.emplace_back(i % 2 == 0 ? "sliding_attention" : "full_attention");
  require(json, "layer_types", {types});
}

JsonObject fields(const GptOssConfig& c) {
  const JsonValue window = c.window > 0 ? JsonValue{c.window} : JsonValue{};
  return joined(grouped_json(c), {{"attention_bias", {c.attention_bias}},
                                  {"intermediate_size", {c.moe_ffn}},
                                  {"num_local_experts", {c.num_experts}},
                                  {"sliding_window", window}});
}

std::vector<formats::DiskTensor> tensors(const GptOssConfig&, const LayerExperts& x,
                                         formats::ExpertLayout) {
  auto all = stacked_in_out(x, /*interleaved=*/true);
  all.push_back(
      {.name = x.name + ".gate_up_proj_bias",
       .shape = {x.E, 2 * x.F},
       .view = {x.E, x.F, 2},
       .sources = {
           {.param = x.name + ".b1", .offset = {0, 0}, .dims = {0, 1}, .fixed = {{2, 0}}},
           {.param = x.name + ".b3", .offset = {0, 0}, .dims = {0, 1}, .fixed = {{2, 1}}}}});
  all.push_back(formats::whole_tensor(x.name + ".down_proj_bias", x.name + ".b2", {x.E, x.D}));
  return all;
}

}  // namespace moesh::models
