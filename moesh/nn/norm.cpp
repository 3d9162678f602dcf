#include "moesh/nn/norm.h"

#include <ATen/ops/rsqrt.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace moesh::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RotationHolder : torch::CustomClassHolder {
  explicit RotationHolder(std::optional<kernels::Rotation> r) : rotation(std::move(r)) {}
  std::optional<kernels::Rotation> rotation;
};

// Saved are the input, which the residual stream holds anyway, and a number for each row.
// The second result is x as it is.
class NormFunction : public torch::autograd::Function<NormFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const std::optional<at::Tensor>& weight, double eps,
                               const c10::intrusive_ptr<RotationHolder>& turn, bool is_beside) {
    const at::Tensor w = weight.value_or(at::Tensor());
    const auto out = kernels::norm_forward(x, w, eps, turn->rotation);
    context->save_for_backward({x, w, out.r});
    context->saved_data["turn"] = c10::IValue::make_capsule(turn);
    context->saved_data["is_beside"] = is_beside;
    return is_beside ? variable_list{out.y, x.detach()} : variable_list{out.y};
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto turn =
        c10::static_intrusive_pointer_cast<RotationHolder>(context->saved_data["turn"].toCapsule());
    const at::Tensor beside = context->saved_data["is_beside"].toBool() ? grads[1] : at::Tensor();
    const auto d =
        kernels::norm_backward(saved[0], saved[1], saved[2], grads[0], turn->rotation, beside);
    return {d.x, d.weight_D, {}, {}, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    const std::optional<kernels::Rotation>& turn) {
  return NormFunction::apply(x, weight.defined() ? std::optional(weight) : std::nullopt, eps,
                             c10::make_intrusive<RotationHolder>(turn), /*is_beside=*/false)[0];
}

std::pair<at::Tensor, at::Tensor> rms_norm_beside(const at::Tensor& x, const at::Tensor& weight,
                                                  double eps) {
  const auto out =
      NormFunction::apply(x, weight, eps, c10::make_intrusive<RotationHolder>(std::nullopt),
                          /*is_beside=*/true);
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
