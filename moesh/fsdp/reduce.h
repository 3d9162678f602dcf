#pragma once
// The gradients of parameters, summed over the ranks while backward goes on: those of a block
// travel together, in one flat buffer, and are awaited two blocks later, the last ones before the
// optimizer reads them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

namespace raw {

struct Reductions;

/// A term of a parameter's gradient, that of this rank's work: [compute region].
struct GradientTerm {
  at::Tensor leaf;  // what gets the gradient: this rank's shard
  at::Tensor grad;
  at::ScalarType dtype;  // of the sum
  std::shared_ptr<comm::Group> storage, replicas;
  std::shared_ptr<comm::Group> same_work;  // ranks that find the same sum
  std::int64_t dim;                        // along which the storage ranks divide it
  std::vector<std::int64_t> sizes;         // of each of them
  std::string name;
};

/// The sum, as a gradient of the leaf: reduce_scatter over the storage ranks, all_reduce over the
/// replicas. It is undefined if the step has `reductions`, which bring it to the leaf, or if there
/// is only one rank: then the leaf keeps it in the type of the work until more is added.
at::Tensor reduce(const GradientTerm& term, const std::shared_ptr<Reductions>& reductions);
/// The same, when no backward waits for it: the sum is added to the leaf.
void reduce_to_leaf(const GradientTerm& term, const std::shared_ptr<Reductions>& reductions);

std::shared_ptr<Reductions> make_reductions();
at::Tensor begin_bucket(const at::Tensor& x);

}  // namespace raw

/// Returns x. Call it where a block of the model begins: when backward leaves the block, the
/// gradients since the last such place become a bucket.
template <auto L>
Tensor<L> begin_bucket(const Tensor<L>& x) {
  return assume<L>(raw::begin_bucket(x.local()));
}

}  // namespace moesh
