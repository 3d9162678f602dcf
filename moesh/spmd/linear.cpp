#include "moesh/spmd/linear.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "moesh/spmd/weights_later.h"

namespace moesh::raw {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::optional<at::Tensor> optional_of(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

class KnownLinear : public torch::autograd::Function<KnownLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& y,
                            const c10::intrusive_ptr<WeightSink>& sink) {
    context->save_for_backward({x, w});
    context->saved_data["has_bias"] = b.has_value();
    context->saved_data["sink"] = c10::IValue::make_capsule(sink);
    return y ? y->detach() : at::linear(x, w, b);
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto sink =
        c10::static_intrusive_pointer_cast<WeightSink>(context->saved_data["sink"].toCapsule());
    const auto saved = context->get_saved_variables();
    const at::Tensor rows = grads[0].flatten(0, -2), x = saved[0].detach().flatten(0, -2);
    const at::Tensor dx = rows.mm(saved[1]).view(saved[0].sizes()),
                     db = context->saved_data["has_bias"].toBool() ? rows.sum(0) : at::Tensor();
    if (sink->is_empty()) return {dx, rows.t().mm(x), db, {}, {}};
    later([sink, rows, x] { sink->give({rows.t().mm(x)}); });
    return {dx, {}, db, {}, {}};
  }
};

at::Tensor known_linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b,
                        const at::Tensor& y) {
  const auto sink = sink_for(x, {w});
  return KnownLinear::apply(x, sink->is_empty() ? w : w.detach(), optional_of(b), optional_of(y),
                            sink);
}

}  // namespace

at::Tensor known_linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  return known_linear(x, w, {}, y);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
  return are_weights_later() ? known_linear(x, w, b, {}) : at::linear(x, w, b);
}

}  // namespace moesh::raw
