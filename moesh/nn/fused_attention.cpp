#include "moesh/nn/attention_functions.h"

#include <torch/csrc/autograd/custom_function.h>

#include "moesh/fsdp/recompute.h"

namespace moesh::nn {
namespace {

using kernels::AttentionConfig;
using kernels::AttentionInput;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::optional<at::Tensor>& sinks,
                            const std::optional<at::Tensor>& starts, double scale,
                            std::int64_t start, std::int64_t window, std::int64_t chunk) {
    const AttentionConfig config{.scale = scale, .start = start, .window = window, .chunk = chunk};
    const at::Tensor given = sinks.value_or(at::Tensor()),
                     starts_BL = starts.value_or(at::Tensor());
    const auto out = run(config, {q, k, v, given, starts_BL});
    context->save_for_backward({q, k, v, given, starts_BL, out.y_BLhv, out.lse_BhL});
    context->saved_data["scale"] = scale;
    context->saved_data["start"] = start;
    context->saved_data["window"] = window;
    context->saved_data["chunk"] = chunk;
    return out.y_BLhv;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const AttentionConfig config{.scale = data["scale"].toDouble(),
                                 .start = data["start"].toInt(),
                                 .window = data["window"].toInt(),
                                 .chunk = data["chunk"].toInt()};
    const auto g = kernels::attention_backward(
        config, {saved[0], saved[1], saved[2], saved[3], saved[4]}, {saved[5], saved[6]}, grads[0]);
    return {g.q_BLhd, g.k_BSgd, g.v_BSgv, g.sinks_h, {}, {}, {}, {}, {}};
  }

 private:
  static kernels::AttentionOutput run(const AttentionConfig& config, const AttentionInput& input) {
    if (const auto first = raw::recall("attention")) return {(*first)[0], (*first)[1]};
    auto out = kernels::attention_forward(config, input);
    raw::keep("attention", {out.y_BLhv, out.lse_BhL});
    return out;
  }
};

}  // namespace

at::Tensor fused_attention(const AttentionConfig& c, const AttentionInput& in) {
  const auto given = [](const at::Tensor& t) {
    return t.defined() ? std::optional(t) : std::nullopt;
  };
  return FusedAttention::apply(in.q_BLhd, in.k_BSgd, in.v_BSgv, given(in.sinks_h),
                               given(in.starts_BL), c.scale, c.start, c.window, c.chunk);
}

}  // namespace moesh::nn
