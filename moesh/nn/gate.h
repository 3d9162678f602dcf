#pragma once
// The logits of the router with their gradient. T tokens, D model, E experts

#include "moesh/spmd/tensor.h"

namespace moesh::nn {

/// x gate' in the precision of the gate: a linear layer of few columns, which keeps x as it is.
/// The cast and the product that it stands for would keep x once more, in float32.
at::Tensor gate_logits(const at::Tensor& x_TD, const at::Tensor& gate_ED);

template <auto A, auto B>
auto gate_logits(const Tensor<A>& x_TD, const Tensor<B>& gate_ED) {
  constexpr auto out = mix(Op::linear, A, B);
  return assume<out>(gate_logits(local(x_TD), local(gate_ED)));
}

}  // namespace moesh::nn
