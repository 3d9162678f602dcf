#include "moesh/models/configs.h"

namespace moesh::models {

void DeepseekMoe::add_to(DecoderPlan& plan) const {
  plan.is_moe = [first = num_dense_layers](std::int64_t layer) { return layer >= first; };
  plan.moe.router = {.scoring = nn::Scoring::sigmoid,
                     .num_groups = num_groups,
                     .top_groups = top_groups,
                     .normalize = normalize,
                     .scale = routed_scale};
  plan.moe.shared_ffn = plan.config.moe_ffn * num_shared;
  plan.ffn = ffn;
  plan.num_mtp_layers = num_mtp_layers;
}

void DeepseekMoe::add_to(ModelFacts& facts) {
  facts.load_balance_coeff = 1e-3, facts.balance_loss_weight = 1e-4;
  facts.stores_expert_bias = true;
}

std::optional<BrokenRule> DeepseekMoe::broken_moe_rule(const DecoderConfig& config) const {
  const std::int64_t num_layers = config.num_layers, num_experts = config.num_experts,
                     top_k = config.top_k;
  if (num_dense_layers > num_layers)
    return BrokenRule{{"num_dense_layers", "num_layers"},
                      detail::concat("; set model.num_dense_layers to ", num_layers, " or less")};
  const std::int64_t of_group = num_experts / num_groups;
  if (num_groups > 1 && (num_experts % num_groups != 0 || of_group < 2)) {
    std::vector<std::int64_t> working = divisors(num_experts);
    if (working.size() > 1) working.pop_back();  // one expert each
    return BrokenRule{{"num_groups", "num_experts"},
                      detail::concat(", and groups must be equal, with two experts or more; set "
                                     "model.num_groups to one of ",
                                     working)};
  }
  if (top_groups > num_groups)
    return BrokenRule{{"top_groups", "num_groups"},
                      detail::concat("; set model.top_groups to ", num_groups, " or less")};
  if (top_k > top_groups * of_group)
    return BrokenRule{{"top_k", "top_groups", "num_groups", "num_experts"},
                      detail::concat(", so a token may use ", top_groups * of_group,
                                     " experts; set model.top_k to ", top_groups * of_group,
                                     " or less, or model.top_groups to ",
                                     (top_k + of_group - 1) / of_group, " or more")};
  return std::nullopt;
}

ModelKeys DeepseekMoe::moe_keys() {
  return {
      {"num_dense_layers", &num_dense_layers,
       "number of blocks, at the beginning, with a dense MLP", 0},
      {"ffn", &ffn, "width of the dense MLP"},
      {"num_shared", &num_shared, "number of shared experts", 0},
      {"num_groups", &num_groups, "number of groups of experts, for node-limited routing"},
      {"top_groups", &top_groups, "number of groups that a token may use"},
      {"normalize", &normalize, "scale the weights of a token's experts to add up to one"},
      {"routed_scale", &routed_scale, "factor on the weights of routed experts"},
      {"num_mtp_layers", &num_mtp_layers,
       "number of layers for multi-token prediction: layer k predicts the token k + 1 ahead", 0,
       64},
  };
}

}  // namespace moesh::models
