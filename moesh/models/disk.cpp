#include "moesh/models/disk.h"

#include <ATen/core/Tensor.h>

#include <numeric>
#include <set>

#include "moesh/base/error.h"
#include "moesh/formats/disk.h"
#include "moesh/fsdp/param.h"
#include "moesh/models/config_json.h"

namespace moesh::models {
namespace {

using formats::DiskTable;
using formats::DiskTensor;
using formats::ExpertLayout;

// "model.layers.1.mlp.gate" of ".weight"
std::string without_last(const std::string& name) { return name.substr(0, name.rfind('.')); }

// Buffers of old versions; a head that is the embedding once more.
bool is_ignored(std::string_view name, bool tied) {
  return name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
}

// Whether a tensor belongs to layer `first` or to one behind it.
bool is_behind(std::string_view name, std::int64_t first) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) return false;
  std::int64_t layer = 0;
  for (const char c : name.substr(kLayers.size())) {
    if (c < '0' || c > '9' || layer > 1'000'000) break;
    layer = 10 * layer + (c - '0');
  }
  return layer >= first;
}

// Multi-token prediction: in files each of its layers has the embedding and the head once more.
template <class Config>
void add_mtp(const Config& c, DiskTable& table) {
  const auto add = [&](std::int64_t layer, const char* name, const std::string& param) {
    table.tensors.push_back(formats::whole_tensor("model.layers." + std::to_string(layer) + name,
                                                  param, {c.vocab, c.dim}));
    table.tensors.back().is_copy = true;
  };
  const std::string embedding = "model.embed_tokens.weight";
  for (std::int64_t k = 0; k < c.num_mtp_layers; ++k) {
    add(c.num_layers + k, ".embed_tokens.weight", embedding);
    add(c.num_layers + k, ".shared_head.head.weight",
        c.tie_embeddings ? embedding : "lm_head.weight");
  }
  table.left_out = [end = c.num_layers + c.num_mtp_layers](std::string_view name) {
    return is_behind(name, end);
  };
  table.to_read_them =
      ". To read and train them set model.num_mtp_layers (num_nextn_predict_layers in config.json) "
      "to the number of these layers";
  table.cure = [n = c.num_layers](std::string_view name) -> std::string {
    return is_behind(name, n)
               ? "set model.num_mtp_layers (num_nextn_predict_layers in config.json) to the "
                 "number of layers for multi-token prediction that are there; without any, to 0"
               : "";
  };
}

// A parameter [rows, columns].
struct NamedMatrix {
  std::string param;
  std::int64_t rows, columns;
};

// Several of them below one another, as a tensor [all rows, 1, columns]. A view has pieces of one
// length: that which divides all of them.
DiskTensor below_one_another(const std::string& name, const std::vector<NamedMatrix>& parts) {
  std::int64_t all = 0, piece = 0;
  for (const NamedMatrix& part : parts) all += part.rows, piece = std::gcd(piece, part.rows);
  const std::int64_t columns = parts.at(0).columns;
  DiskTensor t{.name = name,
               .shape = {all, 1, columns},
               .view = {all / piece, piece, columns},
               .sources = {}};
  for (const NamedMatrix& part : parts)
    for (std::int64_t first = 0; first < part.rows; first += piece)
      t.sources.push_back({.param = part.param,
                           .offset = {first, 0},
                           .dims = {1, 2},
                           .fixed = {{0, std::ssize(t.sources)}}});
  return t;
}

template <class Config>
DiskTable table_of(const Config& c, ExpertLayout layout) {
  const OneRankScope scope;
  const auto model = make_model(c, {.device = at::kMeta});
  const DecoderPlan plan = c.plan();
  std::set<std::string> gates;
  if (c.facts().stores_expert_bias)
    for (auto* router : model->routers()) gates.insert(router->gate().name());
  DiskTable table;
  std::vector<NamedMatrix> convolution;  // of q, k and v (nn/delta_net.h), which tp cuts one by one
  model->each_param([&](Stored& w, bool) {
    const auto& [name, shape] = std::pair{w.spec.name, w.spec.shape};
    if (without_last(name).ends_with(".conv1d")) {
      convolution.push_back({name, shape[0], shape[1]});
      if (!name.ends_with(".v")) return;
      table.tensors.push_back(below_one_another(without_last(name) + ".weight", convolution));
      convolution.clear();
    } else if (w.storage != efsdp) {
      table.tensors.push_back(formats::whole_tensor(name, name, shape));
      if (!gates.contains(name)) return;
      const std::string layer = name.substr(0, name.find(plan.mlp_name) + plan.mlp_name.size());
      const std::string bias = layer + "." + plan.expert_bias_name;
      table.tensors.push_back(formats::whole_tensor(bias, expert_bias_name(name), {shape[0]}));
      table.tensors.back().dtype = formats::Dtype::f32;
    } else if (name.ends_with(".w1")) {  // the layer's other parameters come with it
      const LayerExperts experts{
          .name = without_last(name), .E = shape[0], .F = shape[1], .D = shape[2]};
      for (auto& t : plan.experts_on_disk(experts, layout)) table.tensors.push_back(std::move(t));
    }
  });
  if (layout == ExpertLayout::stacked)
    for (auto& t : table.tensors) t.name = library_name(c, t.name);
  table.ignored = [tied = c.tie_embeddings](std::string_view name) {
    return is_ignored(name, tied);
  };
  if constexpr (std::derived_from<Config, DeepseekMoe>) add_mtp(c, table);
  if constexpr (std::same_as<Config, Qwen3NextConfig>)  // its layers for multi-token prediction
    table.left_out = [](std::string_view name) { return name.starts_with("mtp."); };
  return table;
}

template <class Config>
std::string json_of(const Config& c, formats::Dtype dtype) {
  ConfigJson json;
  json.write("architectures", {JsonList{{Config::kNames.architecture}}});
  json.write("model_type", {Config::kNames.model_type});
  json.write("dtype", {formats::torch_name(dtype)});
  Config(c).fields(json);
  return formats::to_json({std::move(json.written())});
}

// [E, rows, columns] of a parameter, in a tensor of its own for each expert.
DiskTensor one_expert(const std::string& name, const std::string& param, std::int64_t e,
                      std::int64_t rows, std::int64_t columns) {
  return {.name = name,
          .shape = {rows, columns},
          .view = {1, rows, columns},
          .sources = {{.param = param, .offset = {e, 0, 0}, .dims = {0, 1, 2}}}};
}

}  // namespace

std::vector<DiskTensor> one_by_one(const LayerExperts& x, const std::string& gate,
                                   const std::string& up, const std::string& down) {
  std::vector<DiskTensor> all;
  for (std::int64_t e = 0; e < x.E; ++e) {
    const std::string one = x.name + "." + std::to_string(e) + ".";
    all.push_back(one_expert(one + gate + ".weight", x.name + ".w1", e, x.F, x.D));
    all.push_back(one_expert(one + up + ".weight", x.name + ".w3", e, x.F, x.D));
    all.push_back(one_expert(one + down + ".weight", x.name + ".w2", e, x.D, x.F));
  }
  return all;
}

std::vector<DiskTensor> stacked_out_in(const LayerExperts& x) {
  return {
      {.name = x.name + ".gate_up_proj",
       .shape = {x.E, 2 * x.F, x.D},
       .view = {x.E, 2, x.F, x.D},
       .sources =
           {{.param = x.name + ".w1", .offset = {0, 0, 0}, .dims = {0, 2, 3}, .fixed = {{1, 0}}},
            {.param = x.name + ".w3", .offset = {0, 0, 0}, .dims = {0, 2, 3}, .fixed = {{1, 1}}}}},
      formats::whole_tensor(x.name + ".down_proj", x.name + ".w2", {x.E, x.D, x.F})};
}

std::vector<DiskTensor> stacked_in_out(const LayerExperts& x, bool interleaved) {
  DiskTensor gate_up{.name = x.name + ".gate_up_proj",
                     .shape = {x.E, x.D, 2 * x.F},
                     .view = {x.E, x.D, 2, x.F},
                     .sources = {}};
  const std::size_t half = interleaved ? 3 : 2, feature = interleaved ? 2 : 3;
  if (interleaved) gate_up.view = {x.E, x.D, x.F, 2};
  gate_up.sources = {
      {.param = x.name + ".w1", .offset = {0, 0, 0}, .dims = {0, feature, 1}, .fixed = {{half, 0}}},
      {.param = x.name + ".w3",
       .offset = {0, 0, 0},
       .dims = {0, feature, 1},
       .fixed = {{half, 1}}}};
  return {gate_up,
          {.name = x.name + ".down_proj",
           .shape = {x.E, x.F, x.D},
           .view = {x.E, x.F, x.D},
           .sources = {{.param = x.name + ".w2", .offset = {0, 0, 0}, .dims = {0, 2, 1}}}}};
}

std::string expert_bias_name(const std::string& gate_weight) {
  return without_last(gate_weight) + ".expert_bias";
}

AnyConfig config_of(const std::string& config_json, const std::string& name) {
  const formats::JsonValue json = formats::text_model(formats::parse_json(config_json, name));
  try {
    std::string type = json.at("model_type", "it").as_text("model_type");
    // Kimi K2 is DeepSeek-V3 by another name, and its fields have the names that they have there.
    if (type == "kimi_k2") type = DeepseekV3Config::kNames.model_type;
    std::optional<AnyConfig> found;
    std::string known;
    each_model([&]<class Config> {
      known += (known.empty() ? "" : ", ") + std::string(Config::kNames.model_type);
      if (type != Config::kNames.model_type) return;
      Config config;
      ConfigJson of_file(json);
      config.fields(of_file);
      found = config;
    });
    MOESH_CHECK(found, ErrorKind::data, "model_type is '", type, "'; moesh reads ", known,
                ", kimi_k2");
    return *found;
  } catch (const Error& e) {
    throw Error(e.kind(), name + ": " + e.what());
  }
}

std::optional<LostKey> lost_key(const AnyConfig& config) {
  AnyConfig ours = config;
  AnyConfig theirs =
      config_of(std::visit([](const auto& c) { return json_of(c, formats::Dtype::f32); }, config),
                "config.json");
  const ModelKeys written = keys(ours), read = keys(theirs);
  for (std::size_t i = 0; i < written.size(); ++i) {
    const bool is_same = std::visit(
        [](const auto* a, const auto* b) {
          if constexpr (std::same_as<decltype(a), decltype(b)>) return *a == *b;
          return false;
        },
        written[i].target, read[i].target);
    if (is_same) continue;
    const auto text = [](const auto* value) -> std::string {
      if constexpr (std::same_as<decltype(value), const bool*>) return *value ? "true" : "false";
      return detail::concat(*value);
    };
    return LostKey{written[i].name, std::visit(text, read[i].target)};
  }
  return std::nullopt;
}

std::string library_name(const AnyConfig& config, const std::string& name) {
  constexpr std::string_view kOld = ".block_sparse_moe.";
  const auto found = name.find(kOld);
  return std::holds_alternative<GraniteMoeConfig>(config) || found == std::string::npos
             ? name
             : std::string(name).replace(found, kOld.size(), ".mlp.");
}

formats::ModelOnDisk on_disk(const AnyConfig& config) {
  return std::visit(
      [](const auto& c) -> formats::ModelOnDisk {
        return {.model_type = c.kNames.model_type,
                .num_layers = c.num_layers,
                .num_experts = c.num_experts,
                .table = [c](ExpertLayout layout) { return table_of(c, layout); },
                .config_json =
                    [c](formats::Dtype dtype) {
                      const auto lost = lost_key(c);
                      MOESH_CHECK(!lost, ErrorKind::config, c.kNames.name,
                                  ": its config.json has no place for "
                                  "model.",
                                  lost->name, "; set it to ", lost->read_back);
                      return json_of(c, dtype);
                    }};
      },
      config);
}

}  // namespace moesh::models
