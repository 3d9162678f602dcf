#pragma once
// Counts of what rounding to float8 does to the numbers of a step, layer by layer. Every number is
// counted by one rank: of those that have the same, by the first.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <set>
#include <string>

#include "moesh/fsdp/param.h"
#include "moesh/kernels/float8.h"

namespace moesh {

class StepFloat8Counts {
 public:
  StepFloat8Counts(std::int64_t num_layers, at::Device device);

  /// Those of the products with this weight; undefined: it is in no layer.
  kernels::Float8Counts of(const Stored& w) const;
  /// The numbers of a weight as `use` gives them, the first time in this step.
  void add_weight(const Stored& w, const at::Tensor& numbers);
  /// int64 [layers, experts and dense projections, 3, 3], of this rank; see kernels::Float8Counts.
  const at::Tensor& all() const { return all_; }

 private:
  at::Tensor all_;
  std::set<std::string> weights_;  // that were added
};

/// Those of the current step; undefined: nobody counts.
kernels::Float8Counts float8_counts(const Stored& w);

}  // namespace moesh
