#include "moesh/nn/norm.h"

#include <ATen/ops/rsqrt.h>

#include <utility>

#include "moesh/spmd/attach.h"

namespace moesh::nn {
namespace {

// Saved are the input, which the residual stream holds anyway, and a number for each row.
// The second result is x as it is.
raw::Tensors normed(const at::Tensor& x, const at::Tensor& w, double eps,
                    const std::optional<kernels::Rotation>& turn, bool is_beside) {
  return raw::differentiable({x, w}, [&]() -> raw::Differentiable {
    const auto out = kernels::norm_forward(x, w, eps, turn);
    raw::Tensors results{out.y};
    if (is_beside) results.push_back(x.detach());
    return {
        std::move(results), {x, w, out.r}, [turn, is_beside](const auto& saved, const auto& dy) {
          const at::Tensor beside = is_beside ? dy[1] : at::Tensor();
          const auto d = kernels::norm_backward(saved[0], saved[1], saved[2], dy[0], turn, beside);
          return raw::Tensors{d.x, d.weight_D};
        }};
  });
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    const std::optional<kernels::Rotation>& turn) {
  return normed(x, weight, eps, turn, /*is_beside=*/false)[0];
}

std::pair<at::Tensor, at::Tensor> rms_norm_beside(const at::Tensor& x, const at::Tensor& weight,
                                                  double eps) {
  const auto out = normed(x, weight, eps, std::nullopt, /*is_beside=*/true);
  return {out[0], out[1]};
}

Tensor<Dense{Place::T, Place::T, Place::P}> SplitRmsNorm::squares(const Slice& x_BLF) {
  const auto wide = wide_dtype(local(x_BLF).scalar_type());
  return sum<Over::features>(square(cast(flatten(x_BLF, 0, 1), wide)));
}

SplitRmsNorm::Slice SplitRmsNorm::operator()(
    const Slice& x_BLF, const Tensor<Dense{Place::T, Place::T, Place::R}>& squares_N) const {
  const at::Tensor& x = local(x_BLF);
  const auto r_N = map_rows(
      [&](const at::Tensor& squares) {
        return at::rsqrt(squares / static_cast<double>(dim_) + eps_);
      },
      squares_N);
  const auto r_BL1 = unflatten(r_N, 0, {x.size(0), x.size(1), 1});
  return cast(cast(x_BLF, wide_dtype(x.scalar_type())) * r_BL1 * use(weight_), x.scalar_type());
}

}  // namespace moesh::nn
