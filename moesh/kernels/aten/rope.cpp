#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>

#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

struct Pairs {
  at::Tensor a, b;
};

// The features that turn, as pairs in the type of the table.
Pairs pairs_of(const at::Tensor& turning, at::ScalarType wide, bool interleaved) {
  const at::Tensor x = turning.to(wide);
  const std::int64_t half = x.size(-1) / 2;
  if (!interleaved) return {x.narrow(-1, 0, half), x.narrow(-1, half, half)};
  const at::Tensor pairs = x.unflatten(-1, {half, 2});
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}

// [L, 1, f], or [B, L, 1, f] where tokens have lines of their own.
at::Tensor of_tokens(const at::Tensor& table_Pf, const Rotation& r) {
  if (!r.positions_BL.defined()) return table_Pf.unsqueeze(1);
  return table_Pf.index_select(0, r.positions_BL.flatten())
      .reshape({r.positions_BL.size(0), r.positions_BL.size(1), 1, table_Pf.size(1)});
}

at::Tensor joined(const at::Tensor& x, std::int64_t num_kept, const at::Tensor& turned) {
  const at::Tensor rounded = turned.to(x.scalar_type());
  return num_kept == 0 ? rounded : at::cat({x.narrow(-1, 0, num_kept), rounded}, -1);
}

}  // namespace

at::Tensor rotate_forward(const Rotation& r, const at::Tensor& x) {
  const std::int64_t turning = 2 * r.cos_Pf.size(1), num_kept = x.size(-1) - turning;
  const auto [a, b] =
      pairs_of(x.narrow(-1, num_kept, turning), r.cos_Pf.scalar_type(), r.interleaved);
  const at::Tensor cos = of_tokens(r.cos_Pf, r), sin = of_tokens(r.sin_Pf, r);
  return joined(x, num_kept, at::cat({a * cos - b * sin, b * cos + a * sin}, -1));
}

at::Tensor rotate_backward(const Rotation& r, const at::Tensor& dy) {
  const std::int64_t turning = 2 * r.cos_Pf.size(1), num_kept = dy.size(-1) - turning;
  const auto [a, b] = pairs_of(dy.narrow(-1, num_kept, turning), r.cos_Pf.scalar_type(), false);
  const at::Tensor cos = of_tokens(r.cos_Pf, r), sin = of_tokens(r.sin_Pf, r);
  const at::Tensor da = a * cos + b * sin, db = b * cos - a * sin;
  return joined(dy, num_kept,
                r.interleaved ? at::stack({da, db}, -1).flatten(-2) : at::cat({da, db}, -1));
}

}  // namespace moesh::kernels::aten
