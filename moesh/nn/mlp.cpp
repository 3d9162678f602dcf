#include "moesh/nn/mlp.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class SwigluLinear : public torch::autograd::Function<SwigluLinear> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& gate,
                               const at::Tensor& up, const at::Tensor& w,
                               const c10::intrusive_ptr<raw::WeightSink>& sink, bool needs_values,
                               bool wants_hidden, const OwnProducts& own) {
    context->save_for_backward({gate, up, w});
    if (own) context->saved_data["own"] = c10::IValue::make_capsule(own);
    context->saved_data["sink"] = c10::IValue::make_capsule(sink);
    const bool is_unused = !needs_values && raw::is_second_run();
    at::Tensor y, h;
    if (wants_hidden || !is_unused) h = kernels::swiglu_forward(gate, up);
    if (is_unused) {
      auto sizes = gate.sizes().vec();
      sizes.back() = w.size(0);
      y = raw::not_computed(sizes, gate.options());
    } else {
      y = own ? own->forward(h, w) : at::linear(h, w);
    }
    return wants_hidden ? variable_list{y, h} : variable_list{y};
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &gate = saved[0], &up = saved[1], &w = saved[2];
    const at::Tensor rows = grads[0].flatten(0, -2);
    const bool has_dw = context->needs_input_grad(2);
    const auto own = context->saved_data.find("own");
    at::Tensor dh =
        own == context->saved_data.end()
            ? rows.mm(w)
            : c10::static_intrusive_pointer_cast<LinearProducts>(own->second.toCapsule())
                  ->backward(rows, w);
    if (grads.size() > 1) dh.add_(grads[1].flatten(0, -2));
    const auto d = kernels::swiglu_backward(gate, up, dh.view(gate.sizes()), /*wants_h=*/has_dw);
    at::Tensor dw;
    if (has_dw) dw = rows.t().mm(d.h.flatten(0, -2));
    const auto sink = c10::static_intrusive_pointer_cast<raw::WeightSink>(
        context->saved_data["sink"].toCapsule());
    if (!sink->is_empty())
      sink->leave([sink, rows, gate = gate.detach(), up = up.detach()] {
        // One pass over gate and up, for a third of what the layer would have to keep.
        sink->give({rows.t().mm(kernels::swiglu_forward(gate, up).flatten(0, -2))});
      });
    return {d.gate, d.up, dw, {}, {}, {}, {}};
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> swiglu_linear(const at::Tensor& gate, const at::Tensor& up,
                                                const at::Tensor& w, const SwigluOptions& options,
                                                const OwnProducts& own) {
  const auto sink = raw::sink_for(gate, {w});
  const auto out = SwigluLinear::apply(gate, up, sink->is_empty() ? w : w.detach(), sink,
                                       options.needs_values, options.wants_hidden, own);
  return {out[0], options.wants_hidden ? out[1] : at::Tensor()};
}

}  // namespace moesh::nn
