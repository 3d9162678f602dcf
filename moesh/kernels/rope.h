#pragma once
// Rotary embedding of heads: pairs of features turn by an angle that belongs to the position.
// B batch, L tokens, P positions, h heads, d features of a head, f frequencies

#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// The last 2 f features of a head turn, those before them stay.
struct Rotation {
  at::Tensor cos_Pf, sin_Pf;  // a line for each position; float32 (float64 with float64)
  at::Tensor positions_BL;    // int64: the line of each token; undefined: L lines, in their order
  bool interleaved = false;   // pairs (2i, 2i + 1), laid out evens then odds; else (i, i + f)
};

/// x [B, L, h, d] turned, [B, L, h, d].
at::Tensor rotate_forward(const Rotation& rotation, const at::Tensor& x_BLhd);
/// Its adjoint: the gradient of x from that of the result.
at::Tensor rotate_backward(const Rotation& rotation, const at::Tensor& dy_BLhd);

}  // namespace moesh::kernels
