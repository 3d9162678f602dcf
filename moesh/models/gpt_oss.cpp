#include "moesh/models/configs.h"

#include "moesh/models/config_json.h"

namespace moesh::models {

DecoderPlan GptOssConfig::plan() const {
  DecoderPlan plan =
      grouped_plan(*this, [](nn::GroupedAttentionConfig& attention, std::int64_t layer) {
        attention.sinks = true;
        if (layer % 2 == 1) attention.window = 0;
      });
  plan.moe.router = {.scoring = nn::Scoring::softmax_chosen, .gate_bias = true};
  plan.moe.experts.activation = kernels::Activation::clamped_swiglu;
  plan.moe.experts.biases = true;
  plan.moe.router_name = "router";
  plan.experts_on_disk = [](const LayerExperts& x, formats::ExpertLayout) {
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
  };
  plan.published = [](const Stored& w) -> std::optional<kernels::Quantization> {
    const auto how = kernels::Quantization::mxfp4();
    const bool is_matrix_of_experts = w.storage == efsdp && w.spec.shape.size() == 3;
    if (!is_matrix_of_experts || w.spec.shape.back() % how.columns != 0) return std::nullopt;
    return how;
  };
  return plan;
}

std::vector<BuiltIn<GptOssConfig>> GptOssConfig::built_in() {
  GptOssConfig tiny;
  tiny.attention_bias = true, tiny.window = 3, tiny.norm_eps = 1e-5, tiny.init_std = 0.2,
  tiny.bias_std = 0.2;
  tiny.rope.theta = 150000, tiny.rope.factor = 32, tiny.rope.truncate = false;

  GptOssConfig debug = tiny;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16,
  debug.num_kv_heads = 4, debug.head_dim = 64;
  debug.moe_ffn = 256, debug.top_k = 4, debug.window = 32, debug.init_std = 0.02,
  debug.bias_std = 0;

  GptOssConfig small = debug;
  small.vocab = 201088, small.dim = 2880, small.num_layers = 24, small.num_heads = 64,
  small.num_kv_heads = 8;
  small.moe_ffn = 2880, small.num_experts = 32, small.window = 128, small.max_sequence = 131072;

  GptOssConfig large = small;
  large.num_layers = 36, large.num_experts = 128;
  return {{"tiny", tiny}, {"debug", debug}, {"20b", small}, {"120b", large}};
}

void GptOssConfig::fields(ConfigJson& json) {
  nn::RopeConfig absent;
  absent.factor = 32, absent.truncate = false;
  grouped_fields(json, {.theta = 150000, .norm_eps = 1e-5, .head_dim = 64, .rope = absent}, *this);
  json.require("swiglu_limit", {7.0});
  json.require("swiglu_alpha", {1.702});
  json.flag("attention_bias", attention_bias, true);
  json.count("intermediate_size", moe_ffn);
  json.count_or_null("sliding_window", window, 128);
  JsonList types;
  for (std::int64_t i = 0; i < num_layers; ++i)
    types.emplace_back(i % 2 == 0 ? "sliding_attention" : "full_attention");
  json.require("layer_types", {types});
}

}  // namespace moesh::models
