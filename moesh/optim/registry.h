#pragma once
// The update rules that a configuration can ask for, by name.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "moesh/optim/rule.h"

namespace moesh::optim {

/// The values of the keys that a rule reads, by key.
using RuleValues = std::map<std::string, double>;

/// A rule is a class, and a line in the table of registry.cpp.
struct RuleKind {
  std::string name;               // as optimizer.name has it
  std::vector<std::string> keys;  // of [optimizer] that it reads, besides lr
  std::shared_ptr<const Rule> (*make)(const RuleValues& values);  // has a value for each key
};

const std::vector<RuleKind>& rule_kinds();
std::vector<std::string> rule_names();
/// Throws Error (config) which names the known ones where there is none of this name.
const RuleKind& find_rule(const std::string& name);

}  // namespace moesh::optim
