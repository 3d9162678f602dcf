#include "moesh/nn/mlp.h"

#include <torch/csrc/autograd/custom_function.h>

#include "moesh/kernels/swiglu.h"

namespace moesh::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class SwigluFunction : public torch::autograd::Function<SwigluFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate,
                            const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return kernels::swiglu_forward(gate, up);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto d = kernels::swiglu_backward(saved[0], saved[1], grads[0]);
    return {d.gate, d.up};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return SwigluFunction::apply(gate, up);
}

}  // namespace moesh::nn
