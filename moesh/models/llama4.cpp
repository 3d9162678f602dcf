#include "moesh/models/llama4.h"

#include <algorithm>

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
  DecoderPlan plan{.config = *this};
  plan.attention = [c = *this](std::int64_t layer, const std::string& name,
                               const nn::ModuleOptions& o) {
    nn::GroupedAttentionConfig attention = c.attention();
    if (!c.has_positions(layer)) {
      attention.rope.reset();
      attention.growth = c.growth, attention.growth_floor = c.growth_floor;
    } else {
      attention.rope->interleaved = true;
      attention.chunk = c.chunk;
      if (c.qk_norm) attention.qk_norm = nn::QkNorm::plain;
    }
    return std::make_unique<nn::GroupedAttention>(attention, name, o);
  };
  plan.is_moe = [c = *this](std::int64_t layer) { return c.is_moe(layer); };
  plan.moe.router = {.scoring = nn::Scoring::sigmoid, .choose_on_logits = true};
  plan.moe.experts.scores = kernels::ScoreSide::before;
  plan.moe.shared_ffn = moe_ffn;
  plan.moe.router_name = "router", plan.moe.shared_name = "shared_expert";
  plan.ffn = ffn;
  plan.mlp_name = "feed_forward";
  return plan;
}

ModelKeys Llama4Config::keys() {
  ModelKeys all = GroupedDecoderConfig::keys();
  all.insert(
      all.end(),
      {{"ffn", &ffn, "width of the dense MLP"},
       {"moe_step", &moe_step, "one block in this many is a mixture of experts"},
       {"nope_step", &nope_step, "one block in this many has no positions"},
       {"chunk", &chunk,
        "size of the chunks within which blocks with positions attend; 0: no chunks", 0},
       {"qk_norm", &qk_norm, "normalise q and k of the blocks with positions"},
       {"growth", &growth,
        "growth of queries in blocks without positions, with the logarithm of the position"},
       {"growth_floor", &growth_floor, "number of tokens between two steps of that growth"}});
  return all;
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

}  // namespace moesh::models
