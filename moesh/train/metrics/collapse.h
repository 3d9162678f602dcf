#pragma once
// Whether the router has given up experts: a loss that falls does not show it.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace moesh::train {

/// Looks at the tokens of every expert, step by step.
class CollapseWatch {
 public:
  static constexpr std::int64_t kPatience = 20;  // steps

  /// With the counts of a step, layer by layer: a warning for each layer in which a quarter of the
  /// experts or more have had no token for kPatience steps in a row. A layer is told of again only
  /// after it has recovered.
  std::vector<std::string> observe(const std::vector<at::Tensor>& counts_E);

 private:
  struct Layer {
    std::vector<std::int64_t> steps_idle;  // of each expert, in a row
    bool is_told = false;
  };
  std::vector<Layer> layers_;
};

}  // namespace moesh::train
