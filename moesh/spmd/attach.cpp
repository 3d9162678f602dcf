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

#include "moesh/base/this_thread.h"

namespace moesh::raw {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Adjoint : torch::CustomClassHolder {
  Adjoint(std::function<variable_list(const variable_list&)> f, std::shared_ptr<WeightsLater> l)
      : apply(std::move(f)), later(std::move(l)) {}
  std::function<variable_list(const variable_list&)> apply;
  std::shared_ptr<WeightsLater> later;
};

// The first that an adjoint threw in the backward of this thread: between the two stands LibTorch,
// which hands nothing on.
thread_local std::exception_ptr fault;

Adjoint& adjoint_of(AutogradContext& context) {
  return *c10::static_intrusive_pointer_cast<Adjoint>(context.saved_data["adjoint"].toCapsule());
}

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList /*xs*/,
                               const variable_list& outs,
                               const c10::intrusive_ptr<Adjoint>& adjoint) {
    context->saved_data["adjoint"] = c10::IValue::make_capsule(adjoint);
    variable_list own;  // tensors of their own, also where the step returned its input
    for (const auto& out : outs) own.push_back(out.detach());
    return own;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const at::NoGradGuard no_grad;
    try {
      interruption_point();
      variable_list result = adjoint_of(*context).apply(grads);
      result.resize(result.size() + 2);  // nothing for the outs and the adjoint
      return result;
    } catch (...) {
      if (!fault) fault = std::current_exception();
      throw;
    }
  }
};

struct ByHand : torch::CustomClassHolder {
  std::vector<std::size_t> places;  // of the inputs that are defined
  decltype(Differentiable::backward) backward;
};

class Function : public torch::autograd::Function<Function> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList /*inputs*/,
                               const c10::intrusive_ptr<ByHand>& call,
                               const std::function<Differentiable()>& f) {
    Differentiable made = f();
    context->save_for_backward(std::move(made.saved));
    call->backward = std::move(made.backward);
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return std::move(made.results);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto call =
        c10::static_intrusive_pointer_cast<ByHand>(context->saved_data["call"].toCapsule());
    variable_list all = call->backward(context->get_saved_variables(), grads), result;
    for (const auto place : call->places)
      result.push_back(place < all.size() ? std::move(all[place]) : at::Tensor());
    result.resize(result.size() + 2);  // nothing for the call and the function
    return result;
  }
};

}  // namespace

Tensors differentiable(const Tensors& inputs, const std::function<Differentiable()>& forward) {
  auto call = c10::make_intrusive<ByHand>();
  Tensors defined;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined()) defined.push_back(inputs[i]), call->places.push_back(i);
  return Function::apply(at::TensorList(defined), call, forward);
}

namespace {

// Backward reaches this when all users of x have added their gradients, or left them to autograd.
class ForSeveral : public torch::autograd::Function<ForSeveral> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const c10::intrusive_ptr<GradientSum>& sum) {
    context->set_materialize_grads(false);
    context->saved_data["sum"] = c10::IValue::make_capsule(sum);
    context->saved_data["sizes"] = x.sizes();
    return x.detach();
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    at::Tensor dx = sum_of(*context)->take();
    if (dx.defined()) dx = dx.view(context->saved_data["sizes"].toIntVector());
    if (grads[0].defined()) dx = dx.defined() ? dx.add_(grads[0]) : grads[0];
    return {dx, {}};
  }
  static c10::intrusive_ptr<GradientSum> sum_of(AutogradContext& context) {
    return c10::static_intrusive_pointer_cast<GradientSum>(context.saved_data["sum"].toCapsule());
  }
};

}  // namespace

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
  return at::GradMode::is_enabled() && x.requires_grad() && !sum_for(x)
             ? ForSeveral::apply(x, c10::make_intrusive<GradientSum>())
             : x;
}

c10::intrusive_ptr<GradientSum> sum_for(const at::Tensor& x) {
  auto* node = dynamic_cast<torch::autograd::CppNode<ForSeveral>*>(x.grad_fn().get());
  return node ? ForSeveral::sum_of(node->ctx_) : nullptr;
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

void backward(const GradientEdge& from, const at::Tensor& gradient, const at::Tensor& loss) {
  torch::autograd::edge_list roots;
  variable_list seeds;
  if (from.edge.is_valid()) roots.push_back(from.edge), seeds.push_back(gradient);
  if (loss.defined() && loss.requires_grad()) {
    roots.push_back(torch::autograd::impl::gradient_edge(loss));
    seeds.push_back(at::ones_like(loss));
  }
  if (roots.empty()) return;
  run_backward([&] {
    torch::autograd::Engine::get_default_engine().execute(roots, seeds, /*keep_graph=*/false,
                                                          /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  });
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
  if (!weight.defined()) return nullptr;
  auto* node = dynamic_cast<torch::autograd::CppNode<LinearFunction>*>(weight.grad_fn().get());
  return node ? adjoint_of(node->ctx_).later : nullptr;
}

variable_list attach_many(const variable_list& xs, const variable_list& outs,
                          std::function<variable_list(const variable_list&)> adjoint,
                          std::shared_ptr<WeightsLater> later) {
  return LinearFunction::apply(at::TensorList(xs), outs,
                               c10::make_intrusive<Adjoint>(std::move(adjoint), std::move(later)));
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
