#include "moesh/spmd/recompute.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace moesh::raw {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Body : torch::CustomClassHolder {
  std::function<std::vector<at::Tensor>(const at::Tensor&, bool)> f;
  std::vector<bool> defined;
};

class RecomputeFunction : public torch::autograd::Function<RecomputeFunction> {
 public:
  // `anchor` requires a gradient even where x does not, since the parameters inside do.
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const at::Tensor& /*anchor*/, const c10::intrusive_ptr<Body>& body) {
    context->save_for_backward({x});
    context->saved_data["body"] = c10::IValue::make_capsule(body);
    variable_list out;
    for (const auto& t : body->f(x.detach(), false)) {
      body->defined.push_back(t.defined());
      if (t.defined()) out.push_back(t);
    }
    return out;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto body =
        c10::static_intrusive_pointer_cast<Body>(context->saved_data["body"].toCapsule());
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    variable_list outputs, gradients;
    {
      const at::AutoGradMode enable(true);
      size_t next = 0;
      for (const auto& t : body->f(x, true)) {
        if (!t.defined()) continue;
        const auto& g = grads[next++];
        if (t.requires_grad()) outputs.push_back(t), gradients.push_back(g);
      }
    }
    torch::autograd::backward(outputs, gradients);
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const at::Tensor& x, bool again)> f,
    const at::Tensor& x) {
  if (!at::GradMode::is_enabled()) return f(x, false);
  auto body = c10::make_intrusive<Body>();
  body->f = std::move(f);
  const at::Tensor anchor = at::zeros({0}, x.options()).requires_grad_(true);
  const variable_list out = RecomputeFunction::apply(x, anchor, body);
  std::vector<at::Tensor> results;
  size_t next = 0;
  for (bool is_defined : body->defined) results.push_back(is_defined ? out[next++] : at::Tensor());
  return results;
}

}  // namespace moesh::raw
