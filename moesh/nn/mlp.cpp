#include "moesh/nn/mlp.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::nn {

std::pair<at::Tensor, at::Tensor> swiglu_linear(const at::Tensor& gate, const at::Tensor& up,
                                                const at::Tensor& weight,
                                                const SwigluOptions& options,
                                                const OwnProducts& own) {
  const auto sink = raw::sink_for(gate, {weight});
  const at::Tensor w = sink->is_empty() ? weight : weight.detach();
  const auto forward = [&] {
    const bool is_unused = !options.needs_values && raw::is_second_run();
    at::Tensor y, h;
    if (options.wants_hidden || !is_unused) h = kernels::swiglu_forward(gate, up);
    if (is_unused) {
      auto sizes = gate.sizes().vec();
      sizes.back() = w.size(0);
      y = raw::not_computed(sizes, gate.options());
    } else {
      y = own ? own->forward(h, w) : at::linear(h, w);
    }
    return options.wants_hidden ? raw::Tensors{y, h} : raw::Tensors{y};
  };
  const auto backward = [sink, own, has_dw = w.requires_grad()](const raw::Tensors& saved,
                                                                const raw::Tensors& grads) {
    const at::Tensor &gate = saved[0], &up = saved[1], &w = saved[2];
    const at::Tensor rows = grads[0].flatten(0, -2);
    at::Tensor dh = own ? own->backward(rows, w) : rows.mm(w);
    if (grads.size() > 1) dh.add_(grads[1].flatten(0, -2));
    const auto d = kernels::swiglu_backward(gate, up, dh.view(gate.sizes()), /*wants_h=*/has_dw);
    at::Tensor dw;
    if (has_dw) dw = rows.t().mm(d.h.flatten(0, -2));
    if (!sink->is_empty())
      sink->leave([sink, rows, gate = gate.detach(), up = up.detach()] {
        // One pass over gate and up, for a third of what the layer would have to keep.
        sink->give({rows.t().mm(kernels::swiglu_forward(gate, up).flatten(0, -2))});
      });
    return raw::Tensors{d.gate, d.up, dw};
  };
  const auto out = raw::differentiable(
      {gate, up, w}, [&]() -> raw::Differentiable { return {forward(), {gate, up, w}, backward}; });
  return {out[0], options.wants_hidden ? out[1] : at::Tensor()};
}

}  // namespace moesh::nn
