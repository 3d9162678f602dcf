#include "moesh/models/configs.h"

#include "moesh/models/config_json.h"

namespace moesh::models {

DecoderPlan MixtralConfig::plan() const {
  DecoderPlan plan = grouped_plan(*this);
  plan.moe.router = {.scoring = nn::Scoring::softmax, .normalize = true, .epsilon = 0};
  plan.mlp_name = "block_sparse_moe";
  plan.experts_on_disk = [](const LayerExperts& x, formats::ExpertLayout layout) {
    return layout == formats::ExpertLayout::per_expert ? one_by_one(x, "w1", "w3", "w2")
                                                       : stacked_out_in(x);
  };
  return plan;
}

std::vector<BuiltIn<MixtralConfig>> MixtralConfig::built_in() {
  MixtralConfig tiny;
  tiny.norm_eps = 1e-5, tiny.rope.theta = 1e6, tiny.init_std = 0.2, tiny.bias_std = 0.2;

  MixtralConfig debug = tiny;
  debug.vocab = 2048, debug.dim = 256, debug.num_layers = 6, debug.num_heads = 16,
  debug.num_kv_heads = 4, debug.head_dim = 64;
  debug.moe_ffn = 512, debug.init_std = 0.02, debug.bias_std = 0;

  MixtralConfig small = debug;
  small.vocab = 32000, small.dim = 4096, small.num_layers = 32, small.num_heads = 32,
  small.num_kv_heads = 8;
  small.head_dim = 128, small.moe_ffn = 14336, small.max_sequence = 32768,
  small.balance_loss = 0.02;  // as its config.json has it

  MixtralConfig large = small;
  large.dim = 6144, large.num_layers = 56, large.num_heads = 48, large.moe_ffn = 16384,
  large.max_sequence = 65536, large.balance_loss = 1e-3;
  return {{"tiny", tiny}, {"debug", debug}, {"8x7b", small}, {"8x22b", large}};
}

void MixtralConfig::fields(ConfigJson& json) {
  grouped_fields(json, {.theta = 1e6, .norm_eps = 1e-5}, *this);
  json.count("intermediate_size", moe_ffn);
  json.count_or_null("sliding_window", window);
}

}  // namespace moesh::models
