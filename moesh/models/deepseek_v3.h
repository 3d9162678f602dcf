#pragma once
// DeepSeek-V3: multi-head latent attention (MLA), first layers dense, then mixtures of experts with shared experts, node-limited
// sigmoid routing, and balance by an expert bias.

#include <memory>
#include <optional>
#include <string>

#include "moesh/models/model.h"
#include "moesh/nn/dispatch.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/rope.h"

namespace moesh::models {

struct DeepseekV3Config {
  std::int64_t vocab = 96, dim = 32, num_layers = 3, num_dense_layers = 1;
  std::int64_t ffn = 48, moe_ffn = 24;
  std::int64_t num_heads = 4, q_lora_rank = 0, kv_lora_rank = 16, qk_nope_dim = 8, qk_rope_dim = 4, v_dim = 8;
  std::int64_t num_experts = 8, num_shared = 1, top_k = 2, num_groups = 1, top_groups = 1;
  bool normalize = true;
  double routed_scale = 1;
  double norm_eps = 1e-6;
  nn::RopeConfig rope;  // dim is qk_rope_dim
  std::int64_t max_sequence = 4096;
  double init_std = 0.02;

  void validate() const;
  /// "tiny", "debug", "16b" (DeepSeek-V2-Lite's shape with V3's router), "671b" (DeepSeek-V3).
  static DeepseekV3Config named(const std::string& size);
};

struct ModelOptions {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::uint64_t seed = 0;
  nn::Dispatcher dispatcher = nn::Dispatcher::automatic;
  bool forced_balance = false;
};

std::unique_ptr<Model> make_deepseek_v3(const DeepseekV3Config& config, const ModelOptions& options);

}  // namespace moesh::models
