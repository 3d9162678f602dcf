// DeepSeek-V3 in folders. E experts, F width of an expert, D model

#include <optional>

#include "moesh/base/error.h"
#include "moesh/models/disk.h"

namespace moesh::models {
namespace {

using formats::DiskTable;
using formats::DiskTensor;
using formats::ExpertLayout;
using formats::JsonObject;
using formats::JsonValue;

// A field that may be absent or null.
std::optional<JsonValue> field(const JsonValue& json, const std::string& key) {
  const auto* found = json.find(key);
  return found && !found->is_null() ? std::optional(*found) : std::nullopt;
}

std::int64_t count(const JsonValue& json, const std::string& key) {
  const std::int64_t value = json.at(key, "config.json").as_int(key);
  MOESH_CHECK(value >= 1, ErrorKind::data, key, " is ", value, "; it takes 1 or more");
  return value;
}

double number(const JsonValue& json, const std::string& key, double otherwise) {
  const auto value = field(json, key);
  return value ? value->as_number(key) : otherwise;
}

// Variants of the model that moesh does not compute: better an error than other numbers.
void require(const JsonValue& json, const std::string& key, const JsonValue& wanted) {
  const auto value = field(json, key);
  MOESH_CHECK(!value || *value == wanted, ErrorKind::data, key, " is ", formats::to_json(*value), "; moesh computes ",
              formats::to_json(wanted), " alone");
}

// Version 5 has rope_parameters, version 4 rope_theta and rope_scaling.
void read_rope(const JsonValue& json, DeepseekV3Config& c) {
  c.rope.theta = number(json, "rope_theta", 10000);
  auto rope = field(json, "rope_parameters");
  if (!rope) rope = field(json, "rope_scaling");
  const auto interleave = field(json, "rope_interleave");
  c.rope.interleaved = !interleave || interleave->as_bool("rope_interleave");
  c.rope.dim = c.qk_rope_dim;
  c.rope.original_length = c.max_sequence;
  if (!rope) return;
  c.rope.theta = number(*rope, "rope_theta", c.rope.theta);
  auto type = field(*rope, "rope_type");
  if (!type) type = field(*rope, "type");
  const std::string kind = type ? type->as_text("rope_type") : "default";
  MOESH_CHECK(kind == "default" || kind == "yarn", ErrorKind::data, "rope_type is '", kind, "'; moesh computes default and yarn");
  if (kind == "default") return;
  c.rope.factor = number(*rope, "factor", 1);
  if (const auto length = field(*rope, "original_max_position_embeddings"))
    c.rope.original_length = length->as_int("original_max_position_embeddings");
  c.rope.beta_fast = number(*rope, "beta_fast", 32);
  c.rope.beta_slow = number(*rope, "beta_slow", 1);
  c.rope.mscale = number(*rope, "mscale", 0);
  c.rope.mscale_all_dim = number(*rope, "mscale_all_dim", 0);
  const auto truncate = field(*rope, "truncate");
  c.rope.truncate = !truncate || truncate->as_bool("truncate");
}

JsonObject rope_parameters(const nn::RopeConfig& r) {
  if (r.factor <= 1) return {{"rope_type", {"default"}}, {"rope_theta", {r.theta}}};
  JsonObject rope{{"rope_type", {"yarn"}},      {"rope_theta", {r.theta}},
                  {"factor", {r.factor}},       {"original_max_position_embeddings", {r.original_length}},
                  {"beta_fast", {r.beta_fast}}, {"beta_slow", {r.beta_slow}}};
  if (r.mscale != 0) rope.emplace_back("mscale", JsonValue{r.mscale});
  if (r.mscale_all_dim != 0) rope.emplace_back("mscale_all_dim", JsonValue{r.mscale_all_dim});
  if (!r.truncate) rope.emplace_back("truncate", JsonValue{false});
  return rope;
}

const char* torch_name(formats::Dtype dtype) {
  switch (dtype) {
    case formats::Dtype::f64: return "float64";
    case formats::Dtype::bf16: return "bfloat16";
    case formats::Dtype::f16: return "float16";
    default: return "float32";
  }
}

std::string config_text(const DeepseekV3Config& c, formats::Dtype dtype) {
  const JsonValue q_lora = c.q_lora_rank > 0 ? JsonValue{c.q_lora_rank} : JsonValue{};
  return formats::to_json({JsonObject{
      {"architectures", {formats::JsonList{{"DeepseekV3ForCausalLM"}}}},
      {"model_type", {"deepseek_v3"}},
      {"dtype", {torch_name(dtype)}},
      {"vocab_size", {c.vocab}},
      {"hidden_size", {c.dim}},
      {"intermediate_size", {c.ffn}},
      {"moe_intermediate_size", {c.moe_ffn}},
      {"num_hidden_layers", {c.num_layers}},
      {"first_k_dense_replace", {c.num_dense_layers}},
      {"num_attention_heads", {c.num_heads}},
      {"num_key_value_heads", {c.num_heads}},
      {"q_lora_rank", q_lora},
      {"kv_lora_rank", {c.kv_lora_rank}},
      {"qk_nope_head_dim", {c.qk_nope_dim}},
      {"qk_rope_head_dim", {c.qk_rope_dim}},
      {"v_head_dim", {c.v_dim}},
      {"n_routed_experts", {c.num_experts}},
      {"n_shared_experts", {c.num_shared}},
      {"num_experts_per_tok", {c.top_k}},
      {"n_group", {c.num_groups}},
      {"topk_group", {c.top_groups}},
      {"norm_topk_prob", {c.normalize}},
      {"routed_scaling_factor", {c.routed_scale}},
      {"scoring_func", {"sigmoid"}},
      {"topk_method", {"noaux_tc"}},
      {"hidden_act", {"silu"}},
      {"rms_norm_eps", {c.norm_eps}},
      {"rope_interleave", {c.rope.interleaved}},
      {"rope_theta", {c.rope.theta}},
      {"rope_parameters", {rope_parameters(c.rope)}},
      {"max_position_embeddings", {c.max_sequence}},
      {"initializer_range", {c.init_std}},
      {"attention_bias", {false}},
      {"tie_word_embeddings", {c.tie_embeddings}},
  }});
}

// Builds the table in the order of the model.
class Tensors {
 public:
  void same(const std::string& name, const std::vector<std::int64_t>& shape) { as(name, name, shape); }
  void as(const std::string& name, const std::string& param, const std::vector<std::int64_t>& shape) {
    table.tensors.push_back(formats::whole_tensor(name, param, shape));
  }
  // Expert e of a parameter [E, rows, columns].
  void expert(const std::string& name, const std::string& param, std::int64_t e, std::int64_t rows, std::int64_t columns) {
    table.tensors.push_back({.name = name,
                             .shape = {rows, columns},
                             .view = {1, rows, columns},
                             .sources = {{.param = param, .offset = {e, 0, 0}, .dims = {0, 1, 2}}}});
  }
  DiskTable table;
};

void add_mlp(Tensors& t, const std::string& name, std::int64_t D, std::int64_t F) {
  t.same(name + ".gate_proj.weight", {F, D});
  t.same(name + ".up_proj.weight", {F, D});
  t.same(name + ".down_proj.weight", {D, F});
}

void add_moe(Tensors& t, const DeepseekV3Config& c, const std::string& name, ExpertLayout layout) {
  const std::int64_t E = c.num_experts, D = c.dim, F = c.moe_ffn;
  const std::string experts = name + ".experts";
  t.same(name + ".gate.weight", {E, D});
  t.as(name + ".gate.e_score_correction_bias", expert_bias_name(name + ".gate.weight"), {E});
  t.table.tensors.back().dtype = formats::Dtype::f32;
  if (layout == ExpertLayout::per_expert) {
    for (std::int64_t e = 0; e < E; ++e) {
      const std::string one = experts + "." + std::to_string(e);
      t.expert(one + ".gate_proj.weight", experts + ".w1", e, F, D);
      t.expert(one + ".up_proj.weight", experts + ".w3", e, F, D);
      t.expert(one + ".down_proj.weight", experts + ".w2", e, D, F);
    }
  } else {
    t.table.tensors.push_back(
        {.name = experts + ".gate_up_proj",
         .shape = {E, 2 * F, D},
         .view = {E, 2, F, D},
         .sources = {{.param = experts + ".w1", .offset = {0, 0, 0}, .dims = {0, 2, 3}, .fixed = {{1, 0}}},
                     {.param = experts + ".w3", .offset = {0, 0, 0}, .dims = {0, 2, 3}, .fixed = {{1, 1}}}}});
    t.as(experts + ".down_proj", experts + ".w2", {E, D, F});
  }
  if (c.num_shared == 0) return;
  const std::int64_t shared = F * c.num_shared;
  add_mlp(t, name + ".shared_experts", D, shared);
}

void add_attention(Tensors& t, const DeepseekV3Config& c, const std::string& name) {
  const std::int64_t D = c.dim, heads = c.num_heads, qk = c.qk_nope_dim + c.qk_rope_dim;
  if (c.q_lora_rank > 0) {
    t.same(name + ".q_a_proj.weight", {c.q_lora_rank, D});
    t.same(name + ".q_a_layernorm.weight", {c.q_lora_rank});
    t.same(name + ".q_b_proj.weight", {heads * qk, c.q_lora_rank});
  } else {
    t.same(name + ".q_proj.weight", {heads * qk, D});
  }
  t.same(name + ".kv_a_proj_with_mqa.weight", {c.kv_lora_rank + c.qk_rope_dim, D});
  t.same(name + ".kv_a_layernorm.weight", {c.kv_lora_rank});
  t.same(name + ".kv_b_proj.weight", {heads * (c.qk_nope_dim + c.v_dim), c.kv_lora_rank});
  t.same(name + ".o_proj.weight", {D, heads * c.v_dim});
}

// The layer that predicts a second token (its number is the first that the model does not have), and buffers of old versions.
bool is_ignored(std::string_view name, std::int64_t num_layers) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return false;
  std::int64_t layer = 0;
  for (const char c : name.substr(kLayers.size())) {
    if (c < '0' || c > '9' || layer > 1'000'000) break;
    layer = 10 * layer + (c - '0');
  }
  return layer >= num_layers;
}

DiskTable table_of(const DeepseekV3Config& c, ExpertLayout layout) {
  Tensors t;
  t.same("model.embed_tokens.weight", {c.vocab, c.dim});
  for (std::int64_t i = 0; i < c.num_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i);
    t.same(layer + ".input_layernorm.weight", {c.dim});
    add_attention(t, c, layer + ".self_attn");
    t.same(layer + ".post_attention_layernorm.weight", {c.dim});
    if (i < c.num_dense_layers)
      add_mlp(t, layer + ".mlp", c.dim, c.ffn);
    else
      add_moe(t, c, layer + ".mlp", layout);
  }
  t.same("model.norm.weight", {c.dim});
  if (!c.tie_embeddings) t.same("lm_head.weight", {c.vocab, c.dim});
  // Some files repeat a head that is tied.
  t.table.ignored = [n = c.num_layers, tied = c.tie_embeddings](std::string_view name) {
    return is_ignored(name, n) || (tied && name == "lm_head.weight");
  };
  return t.table;
}

}  // namespace

DeepseekV3Config deepseek_v3_config(const JsonValue& json) {
  require(json, "hidden_act", {"silu"});
  require(json, "attention_bias", {false});
  require(json, "scoring_func", {"sigmoid"});
  require(json, "topk_method", {"noaux_tc"});
  require(json, "moe_layer_freq", {std::int64_t{1}});
  DeepseekV3Config c;
  c.vocab = count(json, "vocab_size"), c.dim = count(json, "hidden_size");
  c.num_layers = count(json, "num_hidden_layers");
  c.num_dense_layers = json.at("first_k_dense_replace", "config.json").as_int("first_k_dense_replace");
  MOESH_CHECK(c.num_dense_layers >= 0 && c.num_dense_layers <= c.num_layers, ErrorKind::data, "first_k_dense_replace is ",
              c.num_dense_layers, " of num_hidden_layers = ", c.num_layers);
  c.ffn = count(json, "intermediate_size"), c.moe_ffn = count(json, "moe_intermediate_size");
  c.num_heads = count(json, "num_attention_heads");
  require(json, "num_key_value_heads", {c.num_heads});
  c.q_lora_rank = field(json, "q_lora_rank") ? count(json, "q_lora_rank") : 0;
  c.kv_lora_rank = count(json, "kv_lora_rank");
  c.qk_nope_dim = count(json, "qk_nope_head_dim"), c.qk_rope_dim = count(json, "qk_rope_head_dim");
  c.v_dim = count(json, "v_head_dim");
  const char* experts = "n_routed_experts";
  for (const char* alias : {"num_experts", "num_local_experts"})
    if (!json.find(experts) && json.find(alias)) experts = alias;
  c.num_experts = count(json, experts);
  const auto shared = field(json, "n_shared_experts");
  c.num_shared = shared ? shared->as_int("n_shared_experts") : 0;
  c.top_k = count(json, "num_experts_per_tok");
  // What is left out is what transformers takes it for.
  c.num_groups = json.find("n_group") ? count(json, "n_group") : 8;
  c.top_groups = json.find("topk_group") ? count(json, "topk_group") : 4;
  const auto normalize = field(json, "norm_topk_prob");
  c.normalize = !normalize || normalize->as_bool("norm_topk_prob");
  c.routed_scale = number(json, "routed_scaling_factor", 2.5);
  c.norm_eps = number(json, "rms_norm_eps", 1e-6);
  c.max_sequence = count(json, "max_position_embeddings");
  c.init_std = number(json, "initializer_range", 0.02);
  const auto tied = field(json, "tie_word_embeddings");
  c.tie_embeddings = tied && tied->as_bool("tie_word_embeddings");
  read_rope(json, c);
  return c;
}

formats::ModelOnDisk deepseek_v3_on_disk(const DeepseekV3Config& config) {
  return {.model_type = "deepseek_v3",
          .table = [config](ExpertLayout layout) { return table_of(config, layout); },
          .config_json = [config](formats::Dtype dtype) { return config_text(config, dtype); }};
}

}  // namespace moesh::models
