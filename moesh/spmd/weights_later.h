#pragma once
// Backward in two halves. Another stage of a pipeline waits for the gradients of inputs, but not
// for those of weights, which can be computed at a time when there is nothing else to do. With a
// WeightsLater, backward gives the gradients of inputs and leaves a list of the work for the
// weights: products that give their gradients (linear layers, experts, the embedding), and the
// adjoint of each `use`, which sums over the ranks.
//
// Until that is done the list keeps the operands of these products: the inputs of linear layers and
// experts and the gradients of their outputs, and for experts also the hidden layer and its
// gradients. It does not keep the weights: gathered weights are freed in between (unless the
// gathers of a pipeline are kept for the step). Small parameters (norms, biases, the router's gate,
// sinks) get their gradients at once. So does the head, whose gradient comes with the loss.
//
// With recompute nothing is kept before backward comes to a block. From then on, as above.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "moesh/spmd/attach.h"

namespace moesh {

/// The work for the weights that one backward has left.
class [[nodiscard]] WeightHalf {
 public:
  /// Does it in the order of backward, which is the same on every rank.
  void run();
  std::size_t size() const { return work_.size(); }

 private:
  friend class WeightsLater;
  std::vector<std::function<void()>> work_;
  std::shared_ptr<WeightsLater> list_;
};

/// The list of a step.
class WeightsLater : public std::enable_shared_from_this<WeightsLater> {
 public:
  /// While one lives, nothing is left for later: a backward that is whole, among others that are
  /// not. Several may live at once, in the threads of a rank that take turns.
  class [[nodiscard]] AtOnce {
   public:
    AtOnce() = default;
    explicit AtOnce(std::shared_ptr<WeightsLater> list) : list_(std::move(list)) {
      ++list_->num_at_once_;
    }
    AtOnce(AtOnce&&) = default;
    ~AtOnce() {
      if (list_) --list_->num_at_once_;
    }

   private:
    std::shared_ptr<WeightsLater> list_;  // null: there is none
  };
  AtOnce at_once() { return AtOnce(shared_from_this()); }

  /// Puts f on the list; while a half is being done or nothing is left for later, f runs now.
  void add(std::function<void()> f);
  /// Whether `add` puts on the list.
  bool is_open() const { return num_at_once_ == 0; }
  /// The work that backward has left since the last call.
  WeightHalf take();
  /// At the end of a step: throws Error (internal) where some of it was never done.
  void finish();

 private:
  friend class WeightHalf;
  std::vector<std::function<void()>> work_;
  int num_at_once_ = 0;
  std::int64_t num_left_ = 0;  // that were taken
};

namespace raw {

/// Where the gradients of weights go, without the weights themselves: each to the adjoint of its
/// `use`.
class WeightSink {
 public:
  /// Weights that are undefined or have no gradient are ignored. No weights: there is nothing to
  /// put off.
  explicit WeightSink(const std::vector<at::Tensor>& weights = {},
                      std::shared_ptr<WeightsLater> later = nullptr);
  bool is_empty() const { return edges_.empty(); }
  /// One gradient for each weight; undefined for none.
  void give(const std::vector<at::Tensor>& gradients) const;
  /// Puts f on the list of the weights, or runs it now.
  void leave(std::function<void()> f) const;

 private:
  std::vector<std::shared_ptr<const GradientEdge>> edges_;  // null: of no weight
  std::shared_ptr<WeightsLater> later_;
};

/// The sink of these weights. It is empty unless gradients are left for later, some of these
/// weights have one, and x has one, by which backward reaches it.
std::shared_ptr<const WeightSink> sink_for(const at::Tensor& x,
                                           const std::vector<at::Tensor>& weights);

}  // namespace raw
}  // namespace moesh
