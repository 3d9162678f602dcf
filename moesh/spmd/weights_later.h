#pragma once
// Backward in two halves. Another stage of a pipeline waits for the gradients of inputs; nobody
// waits for those of weights, which can fill a time in which there is nothing else to do. While a
// WeightsLater is there, backward of this thread gives the gradients of inputs, and leaves a list
// of what is to be done for the weights: their gradient, where it is a product of its own (linear
// layers, experts, the embedding), and the adjoint of each `use`, which sums over the ranks.
//
// Until that is done it keeps what these products take: the inputs of the linear layers and
// experts, and the gradients of their outputs; of the experts also the hidden layer and its
// gradients. Not the weights: where they were gathered, they are freed in between (unless the
// gathers of a pipeline are kept for the step). What has few numbers (norms, biases, the router's
// gate, sinks) has its gradient at once, and it is kept. The head does neither: its gradient is
// made with the loss, and is as large as the head.
//
// With recompute nothing is kept before backward comes to a block. From then on, as above.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace moesh {

/// What one backward has left to do for the weights.
class [[nodiscard]] WeightHalf {
 public:
  /// Does it, in the order in which backward came to it, which is the same on every rank.
  void run();
  std::size_t size() const { return work_.size(); }

 private:
  friend class WeightsLater;
  std::vector<std::function<void()>> work_;
  std::shared_ptr<std::int64_t> num_left_;
};

class WeightsLater {
 public:
  /// Off: backward does everything.
  explicit WeightsLater(bool on);
  ~WeightsLater();
  WeightsLater(const WeightsLater&) = delete;
  WeightsLater& operator=(const WeightsLater&) = delete;

  /// What backward has left since the last call.
  WeightHalf take();
  /// At the end of a step: throws Error (internal) where some of it was never done.
  void finish();

 private:
  using Work = std::vector<std::function<void()>>;
  std::unique_ptr<Work> work_;  // null: off
  Work* outer_;
  std::shared_ptr<std::int64_t> num_left_ = std::make_shared<std::int64_t>(0);
};

/// While it lives, there is no WeightsLater on this thread: backward of what is used here does
/// everything.
class WeightsNow {
 public:
  WeightsNow();
  ~WeightsNow();
  WeightsNow(const WeightsNow&) = delete;
  WeightsNow& operator=(const WeightsNow&) = delete;

 private:
  std::vector<std::function<void()>>* outer_;
};

namespace raw {

/// Whether backward of what is computed now leaves its weights for later.
bool are_weights_later();
/// Puts f on the list; without one, f runs now.
void later(std::function<void()> f);

/// Where the gradients of weights go, without the weights themselves: each to the adjoint of its
/// `use`. A capsule for custom functions of autograd.
class WeightSink : public torch::CustomClassHolder {
 public:
  /// An undefined weight is none. No weights: there is nothing to put off.
  explicit WeightSink(const std::vector<at::Tensor>& weights = {});
  ~WeightSink() override;
  bool is_empty() const;
  /// One gradient for each weight; undefined for none.
  void give(const std::vector<at::Tensor>& gradients) const;

 private:
  struct Edges;
  std::unique_ptr<Edges> edges_;
};

/// The sink of these weights, where they are to be left for later and x has a gradient which leads
/// backward there; else an empty one.
c10::intrusive_ptr<WeightSink> sink_for(const at::Tensor& x,
                                        const std::vector<at::Tensor>& weights);

}  // namespace raw
}  // namespace moesh
