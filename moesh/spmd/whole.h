#pragma once
// The only readers of numbers: they accept values that every rank has whole, never a partial sum or
// a shard.

#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

namespace raw {
double number(const at::Tensor& x);
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);
}  // namespace raw

/// The plain tensor of a value that every rank has whole: what `local` gives, with the promise
/// checked.
template <auto L>
const at::Tensor& whole(const Tensor<L>& x) {
  [[maybe_unused]] constexpr auto checked = check_whole(L);
  return x.local();
}

/// The value of a scalar.
template <auto L>
double number(const Tensor<L>& x) {
  [[maybe_unused]] constexpr auto checked = check_whole(L);
  return raw::number(x.local());
}

/// min(1, max_norm / norm), where the norm is: what clips gradients. `norm` is that of all of them,
/// on all ranks; of one that is not finite, whoever takes the factor skips the step.
template <auto L>
at::Tensor clip_factor(const Tensor<L>& norm, double max_norm) {
  [[maybe_unused]] constexpr auto checked = check_whole(L);
  return raw::clip_factor(norm.local(), max_norm);
}

}  // namespace moesh
