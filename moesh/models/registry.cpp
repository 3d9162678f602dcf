#include "moesh/models/registry.h"

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
  each_model([&]<class Config> { names.push_back(Config::kName); });
  return names;
}

std::vector<std::string> model_sizes(const std::string& name) {
  std::vector<std::string> sizes;
  each_model([&]<class Config> {
    if (name == Config::kName)
      for (const auto& b : Config::built_in()) sizes.push_back(b.size);
  });
  if (sizes.empty()) unknown(name);
  return sizes;
}

AnyConfig built_in(const std::string& name, const std::string& size) {
  std::optional<AnyConfig> found;
  each_model([&]<class Config> {
    if (name == Config::kName) found = built_in<Config>(size);
  });
  if (!found) unknown(name);
  return *found;
}

std::string name(const AnyConfig& config) {
  return std::visit([](const auto& c) { return std::string(c.kName); }, config);
}

ModelKeys keys(AnyConfig& config) {
  return std::visit([](auto& c) { return c.keys(); }, config);
}

ModelFacts facts(const AnyConfig& config) {
  return std::visit([](const auto& c) { return c.facts(); }, config);
}

std::unique_ptr<Model> make_model(const AnyConfig& config, const ModelOptions& options) {
  return std::visit([&](const auto& c) { return make_decoder(c.plan(), options); }, config);
}

}  // namespace moesh::models
