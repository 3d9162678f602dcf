#pragma once
#include <ATen/ops/full.h>

#include "moesh/optim/optimizer.h"

namespace moesh::optim {

/// A step that neither clips nor skips.
inline void take_step(Optimizer& optimizer, double lr) {
  optimizer.begin_step(lr);
  const auto number = [&](double x) {
    return at::full({}, x, at::TensorOptions(optimizer.params().device()).dtype(at::kDouble));
  };
  optimizer.update(number(1), number(0));
  optimizer.end_step(/*skipped=*/false);
}

}  // namespace moesh::optim
