// The torch side of the kernels for Hopper: allocates, and calls launch.h. Nothing here waits for
// the device, but for a sort of a part of the experts, whose number of rows is not known before.
// Experts and gate take tensors on meta, too: what is allocated is the same, and nothing is called.
// T tokens, D model, F ffn, E experts, e local experts, K top-k, R rows at their experts

#include <ATen/TensorOperators.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logical_and.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/kernels/cuda/on_device.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace hopper {

// In hopper_around.cpp.
NormForwardKernel norm_forward;
NormBackwardKernel norm_backward;
RotateKernel rotate_forward;
RotateKernel rotate_backward;
AddSinksKernel add_sinks_;
SinkGradientKernel sink_gradient;
LogitSumsKernel logit_sums;
LogitGradientKernel logit_gradient_;
LatentForwardKernel latent_heads_forward;
LatentBackwardKernel latent_heads_backward;
SwigluForwardKernel swiglu_forward;
SwigluBackwardKernel swiglu_backward;
// In hopper_update.cpp.
CastKernel cast_into;
AdamWKernel adamw_;
SumOfSquaresKernel sum_of_squares;

namespace {

/// The experts of one call. Rows at their experts share one buffer: x, then y; dy, then dx, then x.
class Call {
 public:
  Call(const ExpertsConfig& config, const ExpertsWeights& w, const ExpertsInput& input,
       std::int64_t num_rows)
      : run_(input.x),
        input_{aligned(input.x), input.ends_e, input.scores_R, input.token_R, input.inverse_TK},
        weights_{aligned(w.w1_eFD), aligned(w.w3_eFD), aligned(w.w2_eDF),
                 aligned(w.b1_eF),  aligned(w.b3_eF),  aligned(w.b2_eD)},
        experts_{.num_rows = num_rows,
                 .model = w.w1_eFD.size(2),
                 .ffn = w.w1_eFD.size(1),
                 .num_experts = w.w1_eFD.size(0),
                 .ends_E = indices(input.ends_e),
                 .score_R = floats(input.scores_R),
                 .score_before = config.scores == ScoreSide::before,
                 .clamped = config.activation == Activation::clamped_swiglu,
                 .w1_EFD = in(weights_.w1_eFD),
                 .w3_EFD = in(weights_.w3_eFD),
                 .w2_EDF = in(weights_.w2_eDF),
                 .b1_EF = in(weights_.b1_eF),
                 .b3_EF = in(weights_.b3_eF),
                 .b2_ED = in(weights_.b2_eD)} {
    if (gathered()) rows_RD_ = empty_rows();
  }

  ExpertsOutput forward(const ExpertsInput& given) {
    const at::Tensor gate_RF = empty_hidden(), up_RF = empty_hidden(), act_RF = empty_hidden();
    run_("up", up, experts_, in(at_experts(input_.x)), out(gate_RF), out(up_RF), out(act_RF));
    const at::Tensor y_RD = gathered() ? rows_RD_ : empty_rows();
    run_("down", down, experts_, in(act_RF), out(y_RD));
    return {at_tokens(y_RD), {given, gate_RF, up_RF}};
  }

  /// gate_RF and up_RF become their gradients. The gradients of the weights get their memory when
  /// they are made: those of w1 and w3 after the hidden state is gone.
  ExpertsGradients backward(const at::Tensor& gate_RF, const at::Tensor& up_RF,
                            const at::Tensor& dy, at::Tensor* hidden_RF) {
    ExpertsGradients d;
    d.weights.b1_eF = like(weights_.b1_eF), d.weights.b3_eF = like(weights_.b3_eF);
    d.weights.b2_eD = like(weights_.b2_eD);
    {
      const at::Tensor dy_RD = at_experts(dy), act_RF = empty_hidden();
      at::Tensor terms;
      if (input_.scores_R.defined()) {
        terms = at::empty({num_score_terms(experts_.ffn), experts_.num_rows},
                          input_.scores_R.options());
        d.scores_R = at::empty_like(input_.scores_R);
      }
      run_("dh", dh, experts_, in(dy_RD), out(gate_RF), out(up_RF), out(act_RF), floats(terms));
      if (terms.defined())
        run_("score_gradient", score_gradient, experts_, in(dy_RD),
             static_cast<const float*>(floats(terms)), floats(d.scores_R));
      if (hidden_RF)
        *hidden_RF = act_RF;
      else
        d.weights.w2_eDF = gradient_of_w2(dy_RD, act_RF);
      if (weights_.b1_eF.defined() || weights_.b3_eF.defined() || weights_.b2_eD.defined()) {
        const at::Tensor sums = at::empty({num_bias_terms(experts_.num_rows, experts_.num_experts),
                                           std::max(experts_.model, experts_.ffn)},
                                          dy.options().dtype(at::kFloat));
        run_("bias_gradients", bias_gradients, experts_, in(dy_RD), out(gate_RF), out(up_RF),
             floats(sums), out(d.weights.b1_eF), out(d.weights.b3_eF), out(d.weights.b2_eD));
      }
    }
    const at::Tensor dx_RD = gathered() ? rows_RD_ : empty_rows();
    run_("dx", dx, experts_, in(gate_RF), in(up_RF), out(dx_RD));
    d.x = at_tokens(dx_RD);
    if (!hidden_RF) gradients_of_w1_and_w3(gate_RF, up_RF, d.weights);
    return d;
  }

  /// What backward leaves where it gives its hidden state away. The weights of this call stand for
  /// their sizes.
  ExpertsWeights weight_half(const at::Tensor& d_gate_RF, const at::Tensor& d_up_RF,
                             const at::Tensor& hidden_RF, const at::Tensor& dy) {
    ExpertsWeights d;
    d.w2_eDF = gradient_of_w2(at_experts(dy), hidden_RF);
    gradients_of_w1_and_w3(d_gate_RF, d_up_RF, d);
    return d;
  }

 private:
  static at::Tensor like(const at::Tensor& t) {
    return t.defined() ? at::empty(t.sizes(), t.options()) : t;
  }
  at::Tensor gradient_of_w2(const at::Tensor& dy_RD, const at::Tensor& hidden_RF) const {
    const at::Tensor d = like(weights_.w2_eDF);
    run_("dw2", dw2, experts_, in(dy_RD), in(hidden_RF), out(d));
    return d;
  }
  void gradients_of_w1_and_w3(const at::Tensor& d_gate_RF, const at::Tensor& d_up_RF,
                              ExpertsWeights& d) const {
    d.w1_eFD = like(weights_.w1_eFD), d.w3_eFD = like(weights_.w3_eFD);
    run_("dw13", dw13, experts_, in(at_experts(input_.x)), in(d_gate_RF), in(d_up_RF),
         out(d.w1_eFD), out(d.w3_eFD));
  }
  bool gathered() const { return input_.token_R.defined(); }
  at::Tensor empty_rows() const {
    return at::empty({experts_.num_rows, experts_.model}, input_.x.options());
  }
  at::Tensor empty_hidden() const {
    return at::empty({experts_.num_rows, experts_.ffn}, input_.x.options());
  }
  /// [T, D] -> [R, D].
  at::Tensor at_experts(const at::Tensor& x) const {
    if (!gathered()) return aligned(x);
    const at::Tensor& inverse_TK = input_.inverse_TK;
    run_("expand", expand, in(aligned(x)), indices(inverse_TK), out(rows_RD_), x.size(0),
         inverse_TK.size(1), experts_.model);
    return rows_RD_;
  }
  /// [R, D] -> [T, D].
  at::Tensor at_tokens(const at::Tensor& rows_RD) const {
    if (!gathered()) return rows_RD;
    const at::Tensor& inverse_TK = input_.inverse_TK;
    const at::Tensor out_TD = at::empty_like(input_.x);
    run_("combine", combine, in(rows_RD), indices(inverse_TK), static_cast<const void*>(nullptr),
         out(out_TD), out_TD.size(0), inverse_TK.size(1), experts_.model);
    return out_TD;
  }

  OnDeviceOf run_;
  ExpertsInput input_;
  ExpertsWeights weights_;
  Experts experts_;
  at::Tensor rows_RD_;
};

std::int64_t num_rows(const ExpertsInput& input) {
  return input.token_R.defined() ? input.token_R.size(0) : input.x.size(0);
}

ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input) {
  return Call(config, weights, input, num_rows(input)).forward(input);
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  ExpertsSaved saved, const at::Tensor& dy) {
  at::Tensor hidden_RF;
  ExpertsGradients d =
      Call(config, weights, saved.input, num_rows(saved.input))
          .backward(saved.gate_RF, saved.up_RF, dy, config.weights_later ? &hidden_RF : nullptr);
  if (!config.weights_later) return d;
  d.weights_later = [config, saved, dy, hidden_RF, biases = std::exchange(d.weights, {}),
                     shapes = shapes_of(weights)] {
    ExpertsWeights w = Call(config, shapes, saved.input, num_rows(saved.input))
                           .weight_half(saved.gate_RF, saved.up_RF, hidden_RF, dy);
    w.b1_eF = biases.b1_eF, w.b3_eF = biases.b3_eF, w.b2_eD = biases.b2_eD;
    return w;
  };
  return d;
}

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  const std::int64_t num_tokens = scores_TE.size(0), num_experts = scores_TE.size(1);
  if (scores_TE.scalar_type() != at::kFloat || num_experts > 256 || k < 1)
    return aten_kernels().top_k(scores_TE, k);
  const OnDeviceOf run(scores_TE);
  const auto options = scores_TE.options();
  TopK out{at::empty({num_tokens, k}, options),
           at::empty({num_tokens, k}, options.dtype(at::kLong))};
  // Nobody asks for the token of a NaN, for which the host would wait: a NaN is chosen first, and
  // ends the step as its loss.
  run("top_k", cuda::top_k, static_cast<const float*>(floats(scores_TE)), num_tokens, num_experts,
      k, floats(out.values_TK), out.experts_TK.mutable_data_ptr<std::int64_t>(),
      static_cast<std::int32_t*>(nullptr));
  return out;
}

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  if (range.count < 1 || range.count > 512)
    return aten_kernels().sort_by_expert(experts_TK, num_experts, range);
  const OnDeviceOf run(experts_TK);
  at::_assert_async(at::logical_and(experts_TK >= 0, experts_TK < num_experts).all(),
                    "a token chose an expert out of range");
  const at::Tensor chosen_TK = experts_TK.to(at::kInt);
  const auto options = chosen_TK.options();
  const std::int64_t num_choices = chosen_TK.numel();
  Sorted out{.order_R = at::empty({num_choices}, options),
             .token_R = at::empty({num_choices}, options),
             .inverse_TK = at::empty(chosen_TK.sizes(), options),
             .ends_e = at::empty({range.count}, options)};
  Sort sort{.experts_TK = indices(chosen_TK),
            .weight_TK = nullptr,
            .num_tokens = chosen_TK.size(0),
            .top_k = chosen_TK.size(1),
            .first_expert = range.first,
            .num_experts = range.count,
            .workspace = nullptr,
            .ends_E = out.ends_e.mutable_data_ptr<std::int32_t>(),
            .order_R = out.order_R.mutable_data_ptr<std::int32_t>(),
            .token_R = out.token_R.mutable_data_ptr<std::int32_t>(),
            .inverse_TK = out.inverse_TK.mutable_data_ptr<std::int32_t>(),
            .score_R = nullptr};
  const at::Tensor workspace = at::empty({sort_workspace(sort)}, options);
  sort.workspace = workspace.mutable_data_ptr<std::int32_t>();
  run("sort", cuda::sort, sort);
  if (range.count < num_experts) {  // the size of what follows: a wait
    const auto rows = out.ends_e[range.count - 1].item<std::int32_t>();
    out.order_R = out.order_R.narrow(0, 0, rows);
    out.token_R = out.token_R.narrow(0, 0, rows);
  }
  return out;
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  if (rows_RD.dim() != 2 || rows_RD.scalar_type() != at::kBFloat16 || rows_RD.size(1) % 8 != 0 ||
      !in_chunks(rows_RD))
    return aten_kernels().combine_rows(rows_RD, inverse_TK);
  const OnDeviceOf run(rows_RD);
  const std::int64_t num_tokens = inverse_TK.size(0);
  const at::Tensor y_TD = at::empty({num_tokens, rows_RD.size(1)}, rows_RD.options());
  run("combine", combine, in(rows_RD), indices(inverse_TK), static_cast<const void*>(nullptr),
      out(y_TD), num_tokens, inverse_TK.size(1), rows_RD.size(1));
  return y_TD;
}

/// The gate as its kernels have it, or nothing where these do not take it.
struct Gate {
  Router router;
  at::Tensor x_TD, terms;

  Gate(const at::Tensor& x, const at::Tensor& gate_ED)
      : router{.num_tokens = x.size(0),
               .model = x.size(1),
               .num_experts = gate_ED.size(0),
               .top_k = 0} {
    if (x.scalar_type() != at::kBFloat16 || gate_ED.scalar_type() != at::kFloat ||
        router.model < 8 || router.model % 8 != 0 || router.num_experts < 1 ||
        router.num_experts > 256)
      return;
    x_TD = aligned(x);
    terms = at::empty({4, padded_experts(router.num_experts), router.model}, x.options());
    OnDeviceOf{x}("split_gate", split_gate, router, static_cast<const float*>(floats(gate_ED)),
                  out(terms));
  }
  bool taken() const { return terms.defined(); }
};

at::Tensor gate_forward(const at::Tensor& x, const at::Tensor& gate_ED) {
  const Gate gate(x, gate_ED);
  if (!gate.taken()) return aten_kernels().gate_forward(x, gate_ED);
  const at::Tensor logits_TE = at::empty({x.size(0), gate_ED.size(0)}, gate_ED.options());
  OnDeviceOf{x}("route", route, gate.router, in(gate.x_TD), in(gate.terms), floats(logits_TE),
                static_cast<std::int32_t*>(nullptr), static_cast<float*>(nullptr),
                static_cast<std::int32_t*>(nullptr));
  return logits_TE;
}

GateGradients gate_backward(const at::Tensor& x, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE) {
  const Gate gate(x, gate_ED);
  if (!gate.taken()) return aten_kernels().gate_backward(x, gate_ED, d_logits_TE);
  GateGradients d{at::empty_like(gate.x_TD), at::empty_like(gate_ED)};
  const at::Tensor workspace =
      at::empty({route_workspace(gate.router)}, x.options().dtype(at::kByte));
  const float* d_logits = floats(d_logits_TE);
  const RouteGradients gradients{.x_TD = in(gate.x_TD),
                                 .terms = in(gate.terms),
                                 .logits_TE = d_logits,  // of no choice: not looked at
                                 .experts_TK = nullptr,
                                 .d_weights = nullptr,
                                 .inverse_TK = nullptr,
                                 .d_logits_TE = d_logits,
                                 .workspace = out(workspace),
                                 .d_gate_ED = floats(d.gate_ED),
                                 .d_gate_bias_E = nullptr,
                                 .dx_TD = out(d.x_TD)};
  OnDeviceOf{x}("route_backward", route_backward, gate.router, gradients);
  return d;
}

/// Asked in every call, so that the driver is asked once for each device.
std::string refuses_device(at::Device device) {
  constexpr int kMaxDevices = 64;
  struct Answer {
    std::once_flag asked;
    cuda::Error error = nullptr;
  };
  static Answer answers[kMaxDevices];
  int index = device.index();
  if (index < 0) {  // the current one; where there is none, what a question for the first says
    const bool has_devices = c10::impl::hasDeviceGuardImpl(device.type()) &&
                             c10::impl::VirtualGuardImpl(device.type()).deviceCount() > 0;
    index = has_devices ? c10::impl::VirtualGuardImpl(device.type()).getDevice().index() : 0;
  }
  if (index >= kMaxDevices)
    return detail::concat("own kernels take devices 0 to ", kMaxDevices - 1);
  Answer& answer = answers[index];
  std::call_once(answer.asked, [&] { answer.error = check_device(index); });
  return answer.error ? answer.error : "";
}

std::string refuses_experts(const ExpertsConfig&, const ExpertsWeights& w) {
  const at::Tensor& w1 = w.w1_eFD;
  if (w1.scalar_type() != at::kBFloat16)
    return detail::concat("the weights are ", c10::toString(w1.scalar_type()),
                          ", and own kernels take bfloat16");
  if (w1.size(1) < 1 || w1.size(1) % 8 != 0 || w1.size(2) % 8 != 0)
    return detail::concat("the weights are [experts, ", w1.size(1), ", ", w1.size(2),
                          "], and own kernels take multiples of 8");
  if (w1.size(0) < 1 || w1.size(0) > 512)
    return detail::concat("there are ", w1.size(0), " experts, and own kernels take 1 to 512");
  return "";
}

}  // namespace
}  // namespace hopper

const KernelTable& hopper_kernels() {
  static const KernelTable table = [] {
    KernelTable t = aten_kernels();
    t.name = "hopper";
    t.top_k = hopper::top_k;
    t.sort_by_expert = hopper::sort_by_expert;
    t.combine_rows = hopper::combine_rows;
    t.gate_forward = hopper::gate_forward;
    t.gate_backward = hopper::gate_backward;
    t.experts_forward = hopper::experts_forward;
    t.experts_backward = hopper::experts_backward;
    t.norm_forward = hopper::norm_forward;
    t.norm_backward = hopper::norm_backward;
    t.rotate_forward = hopper::rotate_forward;
    t.rotate_backward = hopper::rotate_backward;
    t.add_sinks_ = hopper::add_sinks_;
    t.sink_gradient = hopper::sink_gradient;
    t.logit_sums = hopper::logit_sums;
    t.logit_gradient_ = hopper::logit_gradient_;
    t.latent_heads_forward = hopper::latent_heads_forward;
    t.latent_heads_backward = hopper::latent_heads_backward;
    t.swiglu_forward = hopper::swiglu_forward;
    t.swiglu_backward = hopper::swiglu_backward;
    t.cast_into = hopper::cast_into;
    t.adamw_ = hopper::adamw_;
    t.sum_of_squares = hopper::sum_of_squares;
    t.refuses_device = hopper::refuses_device;
    t.refuses_experts = hopper::refuses_experts;
    return t;
  }();
  return table;
}

}  // namespace moesh::kernels
