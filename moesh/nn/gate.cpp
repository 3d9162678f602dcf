#include "moesh/nn/gate.h"

#include <torch/csrc/autograd/custom_function.h>

#include "moesh/kernels/routing.h"

namespace moesh::nn {
namespace {

class GateFunction : public torch::autograd::Function<GateFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x_TD,
                            const at::Tensor& gate_ED) {
    context->save_for_backward({x_TD, gate_ED});
    return kernels::gate_forward(x_TD, gate_ED);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    auto d = kernels::gate_backward(saved[0], saved[1], grads[0]);
    return {std::move(d.x_TD), std::move(d.gate_ED)};
  }
};

}  // namespace

at::Tensor gate_logits(const at::Tensor& x_TD, const at::Tensor& gate_ED) {
  return GateFunction::apply(x_TD, gate_ED);
}

}  // namespace moesh::nn
