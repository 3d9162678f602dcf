#include "moesh/kernels/latent.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {

LatentHeads latent_heads_forward(const at::Tensor& kv, const at::Tensor& key,
                                 std::int64_t num_own) {
  MOESH_CHECK(kv.defined() && key.defined() && kv.dim() == 4 && key.dim() == 3 &&
                  is_kernel_dtype(kv.scalar_type()) && kv.scalar_type() == key.scalar_type() &&
                  kv.sizes().slice(0, 2) == key.sizes().slice(0, 2) && num_own >= 0 &&
                  num_own <= kv.size(3),
              ErrorKind::data, "kv is ", describe(kv), " and key ", describe(key), ", of which ",
              num_own, " features are keys; pass [batch, positions, heads, features] and [batch, ",
              "positions, features] of one dtype");
  check_same_device("key", key, "kv", kv);
  const at::NoGradGuard no_grad;
  return kernels_for(kv.device()).latent_heads_forward(kv, key, num_own);
}

LatentGradients latent_heads_backward(const at::Tensor& dk, const at::Tensor& dv,
                                      std::int64_t num_own) {
  MOESH_CHECK(dk.defined() && dv.defined() && dk.dim() == 4 && dv.dim() == 4 &&
                  is_kernel_dtype(dk.scalar_type()) && dk.scalar_type() == dv.scalar_type() &&
                  dk.sizes().slice(0, 3) == dv.sizes().slice(0, 3) && num_own >= 0 &&
                  num_own <= dk.size(3),
              ErrorKind::data, "the gradients are ", describe(dk), " of keys and ", describe(dv),
              " of values, of which ", num_own,
              " features are the heads' own; both have the same tokens and heads");
  const at::NoGradGuard no_grad;
  return kernels_for(dk.device()).latent_heads_backward(dk, dv, num_own);
}

}  // namespace moesh::kernels
