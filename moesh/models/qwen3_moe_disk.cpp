#include "moesh/models/disk.h"
#include "moesh/models/disk_json.h"

namespace moesh::models {

void read(const JsonValue& json, Qwen3MoeConfig& c) {
  read_grouped(json, {}, c);
  c.attention_bias = flag(json, "attention_bias", false);
  c.ffn = count(json, "intermediate_size"), c.moe_ffn = count(json, "moe_intermediate_size");
  c.sparse_step = count(json, "decoder_sparse_step", 1);
  c.mlp_only_layers = numbers(json, "mlp_only_layers").value_or(std::vector<std::int64_t>{});
  c.normalize = flag(json, "norm_topk_prob", false);
  c.window = flag(json, "use_sliding_window", false) && field(json, "sliding_window")
                 ? count(json, "sliding_window")
                 : 0;
}

JsonObject fields(const Qwen3MoeConfig& c) {
  const JsonValue window = c.window > 0 ? JsonValue{c.window} : JsonValue{};
  return joined(grouped_json(c), {{"attention_bias", {c.attention_bias}},
                                  {"intermediate_size", {c.ffn}},
                                  {"moe_intermediate_size", {c.moe_ffn}},
                                  {"num_experts", {c.num_experts}},
                                  {"decoder_sparse_step", {c.sparse_step}},
                                  {"mlp_only_layers", {to_list(c.mlp_only_layers)}},
                                  {"norm_topk_prob", {c.normalize}},
                                  {"use_sliding_window", {c.window > 0}},
                                  {"sliding_window", window}});
}

std::vector<formats::DiskTensor> tensors(const Qwen3MoeConfig&, const LayerExperts& x,
                                         formats::ExpertLayout layout) {
  return layout == formats::ExpertLayout::per_expert
             ? one_by_one(x, "gate_proj", "up_proj", "down_proj")
             : stacked_out_in(x);
}

}  // namespace moesh::models
