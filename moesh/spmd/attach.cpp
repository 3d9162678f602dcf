#include "moesh/spmd/attach.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <limits>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/this_thread.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::raw {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The first that an adjoint threw in the backward of this thread: between the two stands LibTorch,
// which hands nothing on.
thread_local std::exception_ptr fault;

// What the graph holds of a function: its backward, and what `attach` or for_several put beside it.
struct ByHand : torch::CustomClassHolder {
  std::vector<std::size_t> places;  // of the inputs that are defined
  decltype(Differentiable::backward) backward;
  std::shared_ptr<WeightsLater> later;
  c10::intrusive_ptr<GradientSum> sum;
};

ByHand& by_hand(AutogradContext& context) {
  return *c10::static_intrusive_pointer_cast<ByHand>(context.saved_data["call"].toCapsule());
}

class Function : public torch::autograd::Function<Function> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList /*inputs*/,
                               const c10::intrusive_ptr<ByHand>& call,
                               const std::function<Differentiable()>& f) {
    Differentiable made = f();
    context->save_for_backward(std::move(made.saved));
    context->set_materialize_grads(!call->sum);
    call->backward = std::move(made.backward);
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return std::move(made.results);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const at::NoGradGuard no_grad;
    try {
      interruption_point();
      ByHand& call = by_hand(*context);
      variable_list all = call.backward(context->get_saved_variables(), grads), result;
      for (const auto place : call.places)
        result.push_back(place < all.size() ? std::move(all[place]) : at::Tensor());
      result.resize(result.size() + 2);  // nothing for the call and the function
      return result;
    } catch (...) {
      if (!fault) fault = std::current_exception();
      throw;
    }
  }
};

Tensors apply_by_hand(const Tensors& inputs, const std::function<Differentiable()>& forward,
                      c10::intrusive_ptr<ByHand> call) {
  Tensors defined;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined()) defined.push_back(inputs[i]), call->places.push_back(i);
  return Function::apply(at::TensorList(defined), call, forward);
}

// The call of the function that made x; null: another one made it.
ByHand* maker_of(const at::Tensor& x) {
  auto* node = dynamic_cast<torch::autograd::CppNode<Function>*>(x.grad_fn().get());
  return node ? &by_hand(node->ctx_) : nullptr;
}

}  // namespace

Tensors differentiable(const Tensors& inputs, const std::function<Differentiable()>& forward) {
  return apply_by_hand(inputs, forward, c10::make_intrusive<ByHand>());
}

void GradientSum::add(const at::Tensor& dx) {
  const at::Tensor rows = dx.flatten(0, -2);
  if (sum_.defined())
    sum_.add_(rows);
  else
    sum_ = rows;
}

void GradientSum::add_product(const at::Tensor& rows, const at::Tensor& w) {
  if (!sum_.defined())
    sum_ = rows.mm(w);
  else if (sum_.is_cpu())
    sum_.add_(rows.mm(w));  // the bits of autograd's sum
  else
    sum_.addmm_(rows, w);
}

at::Tensor for_several(const at::Tensor& x) {
  if (!at::GradMode::is_enabled() || !x.requires_grad() || sum_for(x)) return x;
  auto call = c10::make_intrusive<ByHand>();
  call->sum = c10::make_intrusive<GradientSum>();
  // Backward reaches this when all users of x have added their gradients, or left them to autograd.
  const auto backward = [sum = call->sum, sizes = x.sizes().vec()](const Tensors& /*saved*/,
                                                                   const Tensors& grads) {
    at::Tensor dx = sum->take();
    if (dx.defined()) dx = dx.view(sizes);
    if (grads[0].defined()) dx = dx.defined() ? dx.add_(grads[0]) : grads[0];
    return Tensors{dx};
  };
  return apply_by_hand({x}, [&] { return Differentiable{{x.detach()}, {}, backward}; }, call)[0];
}

c10::intrusive_ptr<GradientSum> sum_for(const at::Tensor& x) {
  const ByHand* maker = maker_of(x);
  return maker ? maker->sum : nullptr;
}

namespace {
// What owns the memory of values that are not computed tells them from all others, also in views.
void delete_not_computed(void* memory) { delete static_cast<at::DataPtr*>(memory); }
}  // namespace

at::Tensor not_computed(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::Tensor one = at::full({}, std::numeric_limits<double>::quiet_NaN(), options);
  const c10::Storage storage = one.storage();
  auto memory = std::make_unique<at::DataPtr>(storage.set_data_ptr({}));
  void* const data = memory->get();
  storage.set_data_ptr_noswap({data, memory.release(), &delete_not_computed, one.device()});
  return one.expand(sizes);
}

at::Tensor not_computed(at::IntArrayRef sizes, const at::Tensor& x) {
  return x.detach().as_strided(sizes, std::vector<std::int64_t>(sizes.size(), 0));
}

bool is_not_computed(const at::Tensor& x) {
  return x.has_storage() && x.storage().data_ptr().get_deleter() == &delete_not_computed;
}

void run_backward(const std::function<void()>& backward) {
  fault = nullptr;
  try {
    backward();
  } catch (...) {
    if (auto original = std::exchange(fault, nullptr)) std::rethrow_exception(original);
    throw;
  }
}

struct GradientEdge {
  torch::autograd::Edge edge;
};

std::shared_ptr<const GradientEdge> gradient_edge(const at::Tensor& x) {
  return std::make_shared<GradientEdge>(torch::autograd::impl::gradient_edge(x));
}

namespace {
void execute(const torch::autograd::edge_list& roots, const Tensors& seeds) {
  torch::autograd::Engine::get_default_engine().execute(roots, seeds, /*keep_graph=*/false,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}
}  // namespace

void backward(const GradientEdge& from, const at::Tensor& gradient, const at::Tensor& loss) {
  torch::autograd::edge_list roots;
  Tensors seeds;
  if (from.edge.is_valid()) roots.push_back(from.edge), seeds.push_back(gradient);
  if (loss.defined() && loss.requires_grad()) {
    roots.push_back(torch::autograd::impl::gradient_edge(loss));
    seeds.push_back(at::ones_like(loss));
  }
  if (!roots.empty()) run_backward([&] { execute(roots, seeds); });
}

at::Tensor attach(const at::Tensor& x, const at::Tensor& out,
                  std::function<at::Tensor(const at::Tensor&)> adjoint,
                  std::shared_ptr<WeightsLater> later) {
  return attach_all(
      {x}, {out},
      [adjoint = std::move(adjoint)](const variable_list& grads) {
        return variable_list{adjoint(grads[0])};
      },
      std::move(later))[0];
}

std::shared_ptr<WeightsLater> later_of(const at::Tensor& weight) {
  const ByHand* maker = weight.defined() ? maker_of(weight) : nullptr;
  return maker ? maker->later : nullptr;
}

variable_list attach_many(const variable_list& xs, const variable_list& outs,
                          std::function<variable_list(const variable_list&)> adjoint,
                          std::shared_ptr<WeightsLater> later) {
  auto call = c10::make_intrusive<ByHand>();
  call->later = std::move(later);
  const auto forward = [&]() -> Differentiable {
    variable_list own;  // tensors of their own, also where the step returned its input
    for (const auto& out : outs) own.push_back(out.detach());
    return {
        own, {}, [adjoint = std::move(adjoint)](const Tensors& /*saved*/, const Tensors& grads) {
          return adjoint(grads);
        }};
  };
  return apply_by_hand(xs, forward, std::move(call));
}

variable_list attach_all(const variable_list& xs, const variable_list& outs,
                         std::function<variable_list(const variable_list&)> adjoint,
                         std::shared_ptr<WeightsLater> later) {
  if (!at::GradMode::is_enabled()) return outs;
  variable_list inputs, values;
  for (size_t i = 0; i < xs.size(); ++i)
    if (xs[i].requires_grad()) inputs.push_back(xs[i]), values.push_back(outs[i]);
  if (inputs.empty()) return outs;
  const auto attached = attach_many(inputs, values, std::move(adjoint), std::move(later));
  variable_list all = outs;
  size_t next = 0;
  for (size_t i = 0; i < xs.size(); ++i)
    if (xs[i].requires_grad()) all[i] = attached[next++];
  return all;
}

}  // namespace moesh::raw

namespace moesh {

void WeightHalf::run() {
  if (work_.empty()) return;
  const at::NoGradGuard no_grad;
  const WeightsLater::AtOnce at_once(list_);
  // Memory that each keeps is freed as soon as it is done.
  raw::run_backward([&] {
    for (auto& work : work_) {
      std::exchange(work, nullptr)();
      --list_->num_left_;
    }
  });
  work_.clear();
}

void WeightsLater::add(std::function<void()> f) {
  if (is_open())
    work_.push_back(std::move(f));
  else
    f();
}

WeightHalf WeightsLater::take() {
  WeightHalf half;
  half.list_ = shared_from_this();
  half.work_ = std::exchange(work_, {});
  num_left_ += static_cast<std::int64_t>(half.work_.size());
  return half;
}

void WeightsLater::finish() {
  const auto never_taken = static_cast<std::int64_t>(work_.size());
  MOESH_CHECK(num_left_ == 0 && never_taken == 0, ErrorKind::internal, "the step has ended, and ",
              num_left_ + never_taken,
              " gradients of weights were left for later and never computed; every backward of "
              "inputs needs its backward of weights");
}

namespace raw {

WeightSink::WeightSink(const std::vector<at::Tensor>& weights, std::shared_ptr<WeightsLater> later)
    : later_(std::move(later)) {
  for (const auto& w : weights)
    edges_.push_back(w.defined() && w.requires_grad() ? gradient_edge(w) : nullptr);
}

void WeightSink::give(const std::vector<at::Tensor>& gradients) const {
  torch::autograd::edge_list roots;
  Tensors seeds;
  for (std::size_t i = 0; i < edges_.size(); ++i)
    if (edges_[i] && gradients[i].defined())
      roots.push_back(edges_[i]->edge), seeds.push_back(gradients[i]);
  execute(roots, seeds);
}

void WeightSink::leave(std::function<void()> f) const {
  if (later_)
    later_->add(std::move(f));
  else
    f();
}

std::shared_ptr<const WeightSink> sink_for(const at::Tensor& x,
                                           const std::vector<at::Tensor>& weights) {
  std::shared_ptr<WeightsLater> later;
  if (at::GradMode::is_enabled() && x.requires_grad())
    for (const auto& w : weights)
      if (!later) later = later_of(w);
  return later ? std::make_shared<WeightSink>(weights, later) : std::make_shared<WeightSink>();
}

}  // namespace raw
}  // namespace moesh
