#include "moesh/nn/mlp.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::nn {

at::Tensor swiglu_linear(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
                         bool needs_values, const OwnProducts& own) {
  const auto sink = raw::sink_for(gate, {weight});
  const at::Tensor w = sink->is_empty() ? weight : weight.detach();
  const auto forward = [&] {
    if (!needs_values && raw::recall("a dense MLP")) {
      auto sizes = gate.sizes().vec();
      sizes.back() = w.size(0);
      return raw::not_computed(sizes, gate.options());
    }
    if (!needs_values) raw::keep("a dense MLP", {});
    const at::Tensor h = kernels::swiglu_forward(gate, up);
    return own ? own->forward(h, w) : at::linear(h, w);
  };
  const auto backward = [sink, own, has_dw = w.requires_grad()](const raw::Tensors& saved,
                                                                const raw::Tensors& dy) {
    const at::Tensor &gate = saved[0], &up = saved[1], &w = saved[2];
    const at::Tensor rows = dy[0].flatten(0, -2);
    const at::Tensor dh = own ? own->backward(rows, w) : rows.mm(w);
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
  return raw::differentiable({gate, up, w}, [&]() -> raw::Differentiable {
    return {{forward()}, {gate, up, w}, backward};
  })[0];
}

}  // namespace moesh::nn
