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
/// replicas. Undefined under a ReduceLater, which brings it to the leaf.
at::Tensor reduce(const GradientTerm& term);
/// The same, when no backward waits for it: the sum is added to the leaf.
void reduce_to_leaf(const GradientTerm& term);

at::Tensor begin_bucket(const at::Tensor& x);

}  // namespace raw

/// While it lives, sums of gradients in backward of this thread are started and not waited for:
/// those of one bucket together. Every rank has the same buckets, and starts and awaits them in the
/// same order. The sums have the bits that they have without it; but under NCCL, whose order of
/// terms depends on the place in a message, and for a parameter that is used twice (a tied
/// embedding), of which several micro-batches are added one use after the other, those of another
/// order.
class ReduceLater {
 public:
  /// Off: sums are awaited at once, one by one.
  explicit ReduceLater(bool on);
  ~ReduceLater();
  ReduceLater(const ReduceLater&) = delete;
  ReduceLater& operator=(const ReduceLater&) = delete;

  /// What backward has left since the last bucket is one, too.
  void start();
  /// Awaits all of them, and adds each to the gradient of its leaf.
  void finish();

 private:
  std::unique_ptr<raw::Reductions> reductions_;  // null: off
  raw::Reductions* outer_ = nullptr;
};

/// x, where a block of the model begins: when backward comes out of it, the gradients since the
/// last such place are a bucket.
template <auto L>
Tensor<L> begin_bucket(const Tensor<L>& x) {
  return assume<L>(raw::begin_bucket(x.local()));
}

}  // namespace moesh
