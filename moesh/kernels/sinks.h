#pragma once
// Sinks after attention without them. A sink is one more score of a head, without a value: with lse
// the logarithm of the sum of exponentials, lse' = log(exp(lse) + exp(sink)) and
// y' = y exp(lse - lse').

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// Writes y' over y [.., L, h, d], and returns lse' of lse [.., h, L]; sinks_h and lse are float32
/// (float64 with float64).
at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h);

/// d(sinks) of y' and lse': minus the sum over the queries of exp(sink - lse') <dy, y'>.
at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h,
                         const at::Tensor& dy);

}  // namespace moesh::kernels
