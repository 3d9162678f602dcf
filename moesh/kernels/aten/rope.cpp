#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
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

at::Tensor joined(const at::Tensor& x, std::int64_t num_kept, const at::Tensor& turned) {
  const at::Tensor rounded = turned.to(x.scalar_type());
  return num_kept == 0 ? rounded : at::cat({x.narrow(-1, 0, num_kept), rounded}, -1);
}

}  // namespace

at::Tensor rotate_forward(const Rotation& r, const at::Tensor& x) {
  const std::int64_t turning = 2 * r.cos_Lf.size(1), num_kept = x.size(-1) - turning;
  const auto [a, b] =
      pairs_of(x.narrow(-1, num_kept, turning), r.cos_Lf.scalar_type(), r.interleaved);
  const at::Tensor cos = r.cos_Lf.unsqueeze(1), sin = r.sin_Lf.unsqueeze(1);  // [L, 1, f]
  return joined(x, num_kept, at::cat({a * cos - b * sin, b * cos + a * sin}, -1));
}

at::Tensor rotate_backward(const Rotation& r, const at::Tensor& dy) {
  const std::int64_t turning = 2 * r.cos_Lf.size(1), num_kept = dy.size(-1) - turning;
  const auto [a, b] = pairs_of(dy.narrow(-1, num_kept, turning), r.cos_Lf.scalar_type(), false);
  const at::Tensor cos = r.cos_Lf.unsqueeze(1), sin = r.sin_Lf.unsqueeze(1);
  const at::Tensor da = a * cos + b * sin, db = b * cos - a * sin;
  return joined(dy, num_kept,
                r.interleaved ? at::stack({da, db}, -1).flatten(-2) : at::cat({da, db}, -1));
}

}  // namespace moesh::kernels::aten
