#pragma once
// The counts of codes of float8 in a step of a small model, on a mesh and on one rank.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "moesh/config/config.h"

namespace moesh::float8_counts_check {

using Args = std::vector<std::string>;

config::Config config_of(const Args& more);
/// As train::Gradients has them.
at::Tensor counts(const Args& more);
/// How they differ from those wanted, or "".
std::string complaint(const Args& way, const at::Tensor& wanted);

}  // namespace moesh::float8_counts_check
