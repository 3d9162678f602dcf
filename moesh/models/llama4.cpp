#include "moesh/models/configs.h"

#include <algorithm>

#include "moesh/models/config_json.h"

namespace moesh::models {

namespace {

// Whether a layer is among those named, or else the last of its `step`.
bool is_chosen(std::int64_t layer, const std::optional<std::vector<std::int64_t>>& named,
               std::int64_t step) {
  if (named) return std::find(named->begin(), named->end(), layer) != named->end();
  return (layer + 1) % step == 0;
}

}  // namespace

bool Llama4Config::is_moe(std::int64_t layer) const {
  return is_chosen(layer, moe_layers, moe_step);
}
bool Llama4Config::has_positions(std::int64_t layer) const {
  return !is_chosen(layer, nope_layers, nope_step);
}

DecoderPlan Llama4Config::plan() const {
  const auto change = [c = *this](nn::GroupedAttentionConfig& attention, std::int64_t layer) {
    if (!c.has_positions(layer)) {
      attention.rope.reset();
      attention.growth = c.growth, attention.growth_floor = c.growth_floor;
    } else {
      attention.rope->interleaved = true;
      attention.chunk = c.chunk;
      if (c.qk_norm) attention.qk_norm = nn::QkNorm::plain;
    }
  };
  DecoderPlan plan = grouped_plan(*this, change);
  plan.is_moe = [c = *this](std::int64_t layer) { return c.is_moe(layer); };
  plan.moe.router = {.scoring = nn::Scoring::sigmoid, .choose_on_logits = true};
  plan.moe.experts.scores = kernels::ScoreSide::before;
  plan.moe.shared_ffn = moe_ffn;
  plan.moe.router_name = "router", plan.moe.shared_name = "shared_expert";
  plan.ffn = ffn;
  plan.mlp_name = "feed_forward";
  plan.experts_on_disk = [](const LayerExperts& x, formats::ExpertLayout) {
    return stacked_in_out(x, /*interleaved=*/false);
  };
  return plan;
}

ModelKeys Llama4Config::keys() {
  return joined(
      GroupedDecoderConfig::keys(),
      {{"ffn", &ffn, "width of the dense MLP"},
       {"moe_step", &moe_step, "one block in this many is a mixture of experts"},
       {"nope_step", &nope_step, "one block in this many has no positions"},
       {"chunk", &chunk,
        "size of the chunks within which blocks with positions attend; 0: no chunks", 0},
       {"qk_norm", &qk_norm, "normalise q and k of the blocks with positions"},
       {"growth", &growth,
        "growth of queries in blocks without positions, with the logarithm of the position"},
       {"growth_floor", &growth_floor, "number of tokens between two steps of that growth"}});
}

std::vector<BuiltIn<Llama4Config>> Llama4Config::built_in() {
  Llama4Config tiny;
  tiny.num_layers = 4, tiny.top_k = 1, tiny.moe_step = 2, tiny.nope_step = 4, tiny.chunk = 3,
  tiny.growth_floor = 2;
  tiny.norm_eps = 1e-5, tiny.rope.theta = 5e5, tiny.init_std = 0.2, tiny.bias_std = 0.2;

  Llama4Config debug;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16,
  debug.num_kv_heads = 4, debug.head_dim = 64;
  debug.ffn = 1024, debug.moe_ffn = 512, debug.top_k = 1, debug.moe_step = 2, debug.chunk = 64,
  debug.growth_floor = 64;
  debug.norm_eps = 1e-5, debug.rope.theta = 5e5;

  Llama4Config scout;
  scout.vocab = 202048, scout.dim = 5120, scout.num_layers = 48, scout.num_heads = 40,
  scout.num_kv_heads = 8;
  scout.head_dim = 128, scout.ffn = 16384, scout.moe_ffn = 8192, scout.num_experts = 16,
  scout.top_k = 1;
  scout.norm_eps = 1e-5, scout.rope.theta = 5e5, scout.max_sequence = 10485760;
  scout.rope.scaling = nn::RopeScaling::llama3, scout.rope.factor = 16,
  scout.rope.original_length = 8192;
  scout.rope.low_turns = scout.rope.high_turns = 1;

  Llama4Config maverick = scout;
  maverick.num_experts = 128, maverick.moe_step = 2, maverick.qk_norm = false,
  maverick.max_sequence = 1048576;
  maverick.rope.factor = 1;
  return {{"tiny", tiny}, {"debug", debug}, {"scout", scout}, {"maverick", maverick}};
}

void Llama4Config::fields(ConfigJson& json) {
  grouped_fields(json, {.theta = 5e5, .norm_eps = 1e-5, .head_dim = 128}, *this);
  json.flag("attention_bias", attention_bias, false);
  json.count("intermediate_size", moe_ffn), json.count("intermediate_size_mlp", ffn);
  json.count("interleave_moe_layer_step", moe_step, 1);
  json.count("no_rope_layer_interval", nope_step, 4);
  std::vector<std::int64_t> moe, rope;  // numbers of the mixtures; of all layers, 1: has positions
  for (std::int64_t i = 0; i < num_layers; ++i) {
    if (is_moe(i)) moe.push_back(i);
    rope.push_back(has_positions(i) ? 1 : 0);
  }
  json.list("moe_layers", moe), json.list("no_rope_layers", rope);
  if (json.reads()) {
    if (json.find("moe_layers")) moe_layers = moe;
    // An empty list counts as absent.
    if (!rope.empty()) {
      MOESH_CHECK(rope.size() >= static_cast<size_t>(num_layers), ErrorKind::data,
                  "no_rope_layers has ", rope.size(),
                  " numbers for num_hidden_layers = ", num_layers);
      nope_layers.emplace();
      for (std::int64_t i = 0; i < num_layers; ++i)
        if (rope[static_cast<size_t>(i)] == 0) nope_layers->push_back(i);
    }
  }
  json.count_or_null("attention_chunk_size", chunk, 8192);
  JsonList types;
  for (std::int64_t i = 0; i < num_layers; ++i)
    types.emplace_back(has_positions(i) ? "chunked_attention" : "full_attention");
  json.require("layer_types", {types});
  json.flag("use_qk_norm", qk_norm, true);
  json.number("attn_scale", growth, 0.1);
  json.count("floor_scale", growth_floor, 8192);
  if (!json.reads()) return json.write("attn_temperature_tuning", {growth != 0});
  // Some folders have a number here.
  const auto tuning = json.find("attn_temperature_tuning");
  if (tuning && (*tuning == JsonValue{false} || *tuning == JsonValue{std::int64_t{0}})) growth = 0;
}

}  // namespace moesh::models
