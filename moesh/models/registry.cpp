#include "moesh/models/registry.h"

#include "moesh/fsdp/param.h"
#include "moesh/models/stage.h"

namespace moesh::models {
namespace {

[[noreturn]] void unknown(const std::string& name) {
  std::string all;
  for (const auto& known : model_names()) all += (all.empty() ? "" : ", ") + known;
  throw Error(ErrorKind::config, "there is no model '" + name + "'; the models are " + all);
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  each_model([&]<class Config> { names.push_back(Config::kNames.name); });
  return names;
}

std::vector<std::string> model_sizes(const std::string& name) {
  std::vector<std::string> sizes;
  each_model([&]<class Config> {
    if (name == Config::kNames.name)
      for (const auto& b : Config::built_in()) sizes.push_back(b.size);
  });
  if (sizes.empty()) unknown(name);
  return sizes;
}

AnyConfig built_in(const std::string& name, const std::string& size) {
  std::optional<AnyConfig> found;
  each_model([&]<class Config> {
    if (name == Config::kNames.name) found = built_in<Config>(size);
  });
  if (!found) unknown(name);
  return *found;
}

std::string name(const AnyConfig& config) {
  return std::visit([](const auto& c) { return std::string(c.kNames.name); }, config);
}

ModelKeys keys(AnyConfig& config) {
  return std::visit([](auto& c) { return c.keys(); }, config);
}

ModelFacts facts(const AnyConfig& config) {
  return std::visit(
      [](const auto& c) {
        ModelFacts facts = c.facts();
        const DecoderPlan plan = c.plan();  // says these once
        facts.num_mtp_layers = plan.num_mtp_layers;
        facts.score_before_experts = plan.moe.experts.scores == kernels::ScoreSide::before;
        // In the library one loss, of the tokens of all layers together, is top_k where experts are
        // balanced. Here each layer has one, which is 1 then, and they are added up.
        std::int64_t num_moe = 0;
        for (std::int64_t layer = 0; layer < c.num_layers; ++layer) num_moe += plan.is_moe(layer);
        const double per_layer =
            static_cast<double>(c.top_k) / static_cast<double>(std::max<std::int64_t>(num_moe, 1));
        facts.balance_loss_weight += c.balance_loss * per_layer;
        return facts;
      },
      config);
}

std::optional<BrokenRule> broken_rule(const AnyConfig& config) {
  return std::visit([](const auto& c) { return c.broken_rule(); }, config);
}

std::vector<std::optional<nn::AttentionOptions>> attention_options(const AnyConfig& config) {
  const OneRankScope scope;
  return std::visit(
      [](const auto& c) {
        const DecoderPlan plan = c.plan();
        nn::ModuleOptions options;
        options.device = at::kMeta;
        std::vector<std::optional<nn::AttentionOptions>> all;
        for (std::int64_t i = 0; i < c.num_layers + plan.num_mtp_layers; ++i)
          all.push_back(plan.attention(i, "", options)->sees());
        return all;
      },
      config);
}

FlopsOfParts flops_of_parts(const AnyConfig& config, std::int64_t sequence) {
  const OneRankScope scope;
  return std::visit(
      [&](const auto& c) {
        const DecoderPlan plan = c.plan();
        const auto flops = [&](std::int64_t begin, std::int64_t end) {
          return Stage(plan, {.device = at::kMeta}, {begin, end}).flops_per_token(sequence);
        };
        // Only the head is a stage of no layer; what is left of the last layer is its own.
        FlopsOfParts all{.layers = {}, .head = flops(c.num_layers, c.num_layers)};
        for (std::int64_t i = 0; i < c.num_layers; ++i) {
          const double layer = flops(i, i + 1);
          all.layers.push_back(i + 1 == c.num_layers ? layer - all.head : layer);
        }
        return all;
      },
      config);
}

std::map<std::string, kernels::Quantization> published_quantization(const AnyConfig& config) {
  const auto published = std::visit([](const auto& c) { return c.plan().published; }, config);
  std::map<std::string, kernels::Quantization> all;
  if (!published) return all;
  const OneRankScope scope;
  make_model(config, {.device = at::kMeta})->each_param([&](const Stored& w, bool) {
    if (const auto how = published(w)) all.emplace(w.spec.name, *how);
  });
  return all;
}

std::set<std::string> float8_params(const AnyConfig& config) {
  std::set<std::string> all;
  const OneRankScope scope;
  make_model(config, {.device = at::kMeta})->each_param([&](const Stored& w, bool) {
    const bool is_projection = w.spec.name.find("_proj") != std::string::npos;
    if (w.spec.shape.size() >= 2 && w.spec.is_matrix && (w.storage == efsdp || is_projection))
      all.insert(w.spec.name);
  });
  return all;
}

std::unique_ptr<Model> make_model(const AnyConfig& config, const ModelOptions& options) {
  if (const auto broken = broken_rule(config)) {
    AnyConfig copy = config;  // keys point into what they are taken of
    std::string text;
    for (const std::string& name : broken->keys)
      for (const ModelKey& key : keys(copy))
        if (key.name == name)
          std::visit(
              [&](const auto* value) {
                text +=
                    detail::concat(text.empty() ? "model." : ", and model.", name, " is ", *value);
              },
              key.target);
    throw Error(ErrorKind::config, models::name(config) + ": " + text + broken->cure);
  }
  return std::visit([&](const auto& c) { return std::make_unique<Model>(c.plan(), options); },
                    config);
}

}  // namespace moesh::models
