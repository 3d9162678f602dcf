#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace moesh::nn {

/// Runs f(x, false) without keeping anything of its inside, and f(x, true) once more in backward.
/// f's results may hang on x and on parameters; undefined results stay undefined. Every rank
/// recomputes in the same order, so f may hold collectives.
std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const at::Tensor& x, bool again)> f, const at::Tensor& x);

}  // namespace moesh::nn
