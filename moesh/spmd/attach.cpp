#include "moesh/spmd/attach.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <exception>
#include <utility>

namespace moesh::raw {
namespace {

struct Adjoint : torch::CustomClassHolder {
  explicit Adjoint(std::function<at::Tensor(const at::Tensor&)> f) : apply(std::move(f)) {}
  std::function<at::Tensor(const at::Tensor&)> apply;
};

thread_local std::exception_ptr
    fault;  // the first that an adjoint threw in the backward of this thread

class LinearFunction : public torch::autograd::Function<LinearFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& /*x*/,
                            const at::Tensor& out, const c10::intrusive_ptr<Adjoint>& adjoint) {
    context->saved_data["adjoint"] = c10::IValue::make_capsule(adjoint);
    return out.detach();  // a tensor of its own, also where the step returned its input
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const at::NoGradGuard no_grad;
    const auto adjoint =
        c10::static_intrusive_pointer_cast<Adjoint>(context->saved_data["adjoint"].toCapsule());
    try {
      return {adjoint->apply(grads[0]), at::Tensor(), at::Tensor()};
    } catch (...) {
      if (!fault) fault = std::current_exception();
      throw;
    }
  }
};

}  // namespace

void run_backward(const std::function<void()>& backward) {
  fault = nullptr;
  try {
    backward();
  } catch (...) {
    if (auto original = std::exchange(fault, nullptr)) std::rethrow_exception(original);
    throw;
  }
}

at::Tensor attach(const at::Tensor& x, const at::Tensor& out,
                  std::function<at::Tensor(const at::Tensor&)> adjoint) {
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return out;
  return LinearFunction::apply(x, out, c10::make_intrusive<Adjoint>(std::move(adjoint)));
}

}  // namespace moesh::raw
