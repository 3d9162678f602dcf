#include "moesh/optim/registry.h"

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/optim/adamw.h"
#include "moesh/optim/sgd.h"

namespace moesh::optim {
namespace {

using RulePtr = std::shared_ptr<const Rule>;

RulePtr make_adamw(const RuleValues& v) {
  return std::make_shared<AdamW>(AdamWConfig{.beta1 = v.at("beta1"),
                                             .beta2 = v.at("beta2"),
                                             .eps = v.at("eps"),
                                             .weight_decay = v.at("weight_decay")});
}

RulePtr make_sgd(const RuleValues& v) {
  return std::make_shared<Sgd>(
      SgdConfig{.momentum = v.at("momentum"), .weight_decay = v.at("weight_decay")});
}

}  // namespace

const std::vector<RuleKind>& rule_kinds() {
  static const std::vector<RuleKind> all{
      {"adamw", {"beta1", "beta2", "eps", "weight_decay"}, make_adamw},
      {"sgd", {"momentum", "weight_decay"}, make_sgd}};
  return all;
}

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const auto& kind : rule_kinds()) names.push_back(kind.name);
  return names;
}

const RuleKind& find_rule(const std::string& name) {
  for (const auto& kind : rule_kinds())
    if (kind.name == name) return kind;
  throw Error(ErrorKind::config, detail::concat("no update rule is called '", name, "'; use ",
                                                joined_by_or(rule_names())));
}

}  // namespace moesh::optim
