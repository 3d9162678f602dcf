#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace moesh {
class WeightsLater;
}

namespace moesh::raw {

using Tensors = std::vector<at::Tensor>;

/// What a function of tensors makes, and its backward.
struct Differentiable {
  Tensors results;
  /// What backward reads. Nothing else may hold results, or they would never be freed.
  Tensors saved;
  /// The gradients of the inputs in their order; undefined, or left out at the end: none.
  std::function<Tensors(const Tensors& saved, const Tensors& gradients)> backward;
};
/// The results of `forward`, which runs without autograd, as a function of the inputs; undefined
/// ones count in their order.
Tensors differentiable(const Tensors& inputs, const std::function<Differentiable()>& forward);

/// Gives `out`, computed without autograd as a linear function of x, its gradient: `adjoint` takes
/// that of out to that of x. Backward calls it once, on every rank, also when no gradient came
/// (then with zeros): it may hold collectives. `later` is for a weight whose gradient may be left
/// on that list.
at::Tensor attach(const at::Tensor& x, const at::Tensor& out,
                  std::function<at::Tensor(const at::Tensor&)> adjoint,
                  std::shared_ptr<WeightsLater> later = nullptr);
/// The list of what `attach` has given; null: it has none, or is something else.
std::shared_ptr<WeightsLater> later_of(const at::Tensor& weight);

/// The same for several tensors at once: `adjoint` takes the gradients of those outs whose x needs
/// one to the gradients of these xs, and is not called where none does.
std::vector<at::Tensor> attach_all(
    const std::vector<at::Tensor>& xs, const std::vector<at::Tensor>& outs,
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> adjoint,
    std::shared_ptr<WeightsLater> later = nullptr);

/// The same for any number of xs, each of which needs a gradient, and any number of outs: `adjoint`
/// takes the gradients of these to those of the xs.
std::vector<at::Tensor> attach_many(
    const std::vector<at::Tensor>& xs, const std::vector<at::Tensor>& outs,
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> adjoint,
    std::shared_ptr<WeightsLater> later = nullptr);

/// The gradient of one x that several functions of autograd take, as they add it up themselves.
class GradientSum : public torch::CustomClassHolder {
 public:
  /// dx of x's sizes, which is the sum's from now on.
  void add(const at::Tensor& dx);
  /// rows w, of rows [N, out] and w [out, in], by the product itself.
  void add_product(const at::Tensor& rows, const at::Tensor& w);
  /// Undefined: nothing was added.
  at::Tensor take() { return std::exchange(sum_, {}); }

 private:
  at::Tensor sum_;  // [N, in]
};
/// x for several: what finds a sum for it adds its gradient there and returns none; what others
/// return, autograd adds.
at::Tensor for_several(const at::Tensor& x);
/// That of what for_several gave; null: none.
c10::intrusive_ptr<GradientSum> sum_for(const at::Tensor& x);

/// Stands for a value that no gradient needs, where the graph needs its place: a result of the
/// second run of a recompute. It is NaN, without memory, so that a gradient which does need it
/// shows. Steps between ranks, and what moves or adds rows, do nothing with it but give one of the
/// sizes of their result.
at::Tensor not_computed(at::IntArrayRef sizes, const at::TensorOptions& options);
/// The same in other sizes, with the memory of `x`.
at::Tensor not_computed(at::IntArrayRef sizes, const at::Tensor& x);
bool is_not_computed(const at::Tensor& x);

/// Runs a backward. What an adjoint throws comes out of here as it was thrown: LibTorch 2.11 puts
/// an internal error in its place when backward runs in the caller's thread.
void run_backward(const std::function<void()>& backward);
/// Where the gradient of a tensor goes: that of the graph which made it, without its values.
struct GradientEdge;
std::shared_ptr<const GradientEdge> gradient_edge(const at::Tensor& x);
/// One backward, from a gradient and from a scalar loss; undefined: only from the gradient. What
/// depends on nothing that has a gradient is passed over.
void backward(const GradientEdge& from, const at::Tensor& gradient, const at::Tensor& loss);

}  // namespace moesh::raw
