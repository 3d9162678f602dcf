#include "moesh/nn/latent.h"

#include <torch/csrc/autograd/custom_function.h>

#include "moesh/kernels/latent.h"
#include "moesh/spmd/map.h"

namespace moesh::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class LatentFunction : public torch::autograd::Function<LatentFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& kv,
                               const at::Tensor& key, std::int64_t num_own) {
    context->saved_data["num_own"] = num_own;
    const auto y = kernels::latent_heads_forward(kv, key, num_own);
    return {y.k_BLhd, y.v_BLhv};
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto d =
        kernels::latent_heads_backward(grads[0], grads[1], context->saved_data["num_own"].toInt());
    return {d.kv, d.key, {}};
  }
};

}  // namespace

std::pair<Heads, Heads> latent_heads(const Heads& kv, const Full& key, std::int64_t num_own) {
  variable_list parts;
  const auto part = [&](std::size_t i) {
    return map_heads(
        [&](const at::Tensor& heads, const at::Tensor& shared) {
          if (parts.empty()) parts = LatentFunction::apply(heads, shared, num_own);
          return parts[i];
        },
        kv, key);
  };
  Heads k = part(0);
  return {std::move(k), part(1)};
}

}  // namespace moesh::nn
