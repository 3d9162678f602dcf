#include "moesh/train/model_setup.h"

namespace moesh::train {

ModelKeys ModelSetup::keys() {
  auto& c = deepseek_v3;
  return {
      {"vocab_size", &c.vocab, "tokens of the vocabulary"},
      {"dim", &c.dim, "width of the residual stream"},
      {"num_layers", &c.num_layers, "blocks"},
      {"num_dense_layers", &c.num_dense_layers, "first blocks with a dense MLP"},
      {"ffn", &c.ffn, "width of the dense MLP"},
      {"moe_ffn", &c.moe_ffn, "width of an expert"},
      {"num_heads", &c.num_heads, "attention heads"},
      {"q_lora_rank", &c.q_lora_rank, "rank of the query projection; 0: full"},
      {"kv_lora_rank", &c.kv_lora_rank, "rank of the key and value latent"},
      {"qk_nope_dim", &c.qk_nope_dim, "features of a head without rotation"},
      {"qk_rope_dim", &c.qk_rope_dim, "rotated features of a head"},
      {"v_dim", &c.v_dim, "value features of a head"},
      {"num_experts", &c.num_experts, "routed experts"},
      {"num_shared", &c.num_shared, "shared experts"},
      {"top_k", &c.top_k, "experts of a token"},
      {"num_groups", &c.num_groups, "groups of experts in node-limited routing"},
      {"top_groups", &c.top_groups, "groups that a token may use"},
      {"normalize", &c.normalize, "weights of a token add up to one"},
      {"routed_scale", &c.routed_scale, "factor on the weights"},
      {"norm_eps", &c.norm_eps, "epsilon of the norms"},
      {"rope_theta", &c.rope.theta, "base of the rotary frequencies"},
      {"max_sequence", &c.max_sequence, "longest sequence"},
      {"init_std", &c.init_std, "standard deviation of the initial weights"},
  };
}

ModelFacts ModelSetup::facts() const {
  const auto& c = deepseek_v3;
  return {.num_heads = c.num_heads,
          .num_kv_heads = c.num_heads,
          .num_experts = c.num_experts,
          .top_k = c.top_k,
          .max_sequence = c.max_sequence,
          .vocab_size = c.vocab};
}

ModelSetup model_setup(Config& config) {
  check_option(config, "model.name");
  check_option(config, "model.size");
  ModelSetup setup{models::DeepseekV3Config::named(config.model.size)};
  apply_model_keys(config, setup.keys());
  setup.deepseek_v3.rope.dim = setup.deepseek_v3.qk_rope_dim;
  return setup;
}

models::ModelOptions model_options(const Config& config) {
  return {.dtype = scalar_type(config),
          .device = device(config),
          .seed = static_cast<std::uint64_t>(config.training.seed),
          .dispatcher = dispatcher(config),
          .forced_balance = config.moe.force_load_balance};
}

std::unique_ptr<models::Model> make_model(const ModelSetup& setup, const Config& config) {
  return models::make_deepseek_v3(setup.deepseek_v3, model_options(config));
}

}  // namespace moesh::train
