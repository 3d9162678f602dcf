#include "moesh/nn/experts.h"

#include <ATen/ATen.h>

#include <utility>

#include "moesh/base/error.h"
#include "moesh/fsdp/float8_counts.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/rowwise.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/transitions.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::nn {
namespace {

using enum Place;

// What a call of the experts needs besides its tensors.
struct ExpertsCall {
  kernels::ExpertsConfig config;
  at::Tensor ends_e, token_R, inverse;
  double scale13 = 1, scale2 = 1;  // of LoRA
  kernels::ExpertsCodes codes;
  c10::intrusive_ptr<raw::GradientSum> sum;  // of x; null: autograd adds
  std::shared_ptr<const raw::WeightSink> sink;

  /// From `first` on, in the order of `listed`.
  kernels::ExpertsWeights weights(const raw::Tensors& t, std::size_t first) const {
    const auto at = [&](std::size_t i) { return t[first + i]; };
    return {at(0), at(1), at(2), at(3), at(4), at(5), {at(6), at(7), at(8), at(9), scale13, scale2},
            codes};
  }
};

raw::Tensors listed(const kernels::ExpertsWeights& w) {
  return {w.w1_eFD, w.w3_eFD,       w.w2_eDF,        w.b1_eF,       w.b3_eF,
          w.b2_eD,  w.lora.a13_erD, w.lora.b13_e2Fr, w.lora.a2_erF, w.lora.b2_eDr};
}

kernels::ExpertsOutput kept_or_run(const ExpertsCall& call, const kernels::ExpertsWeights& weights,
                                   const kernels::ExpertsInput& input) {
  const auto no_y = [&] { return raw::not_computed(input.x.sizes(), input.x.options()); };
  if (auto first = raw::recall("pre-activations of experts")) {
    const auto& kept = *first;
    return {no_y(),
            {input, kept[0], kept[1], kept[2], kept[3],
             static_cast<std::uint32_t>(kept[0]._version())}};
  }
  auto out = kernels::experts_forward(call.config, weights, input);
  if (raw::is_second_run()) out.y = no_y();
  const auto& s = out.saved;
  raw::keep("pre-activations of experts", {s.gate_RF, s.up_RF, s.low13_Rr, s.low2_Rr});
  return out;
}

// Forward and backward by hand: saved are the input rows, the pre-activations, the indices and the
// scores, and the weights.
at::Tensor run_experts(const ExpertsCall& call, const at::Tensor& x, const at::Tensor& scores_R,
                       const raw::Tensors& weights) {
  raw::Tensors inputs{x, scores_R};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  return raw::differentiable(inputs, [&]() -> raw::Differentiable {
    const auto out = kept_or_run(call, call.weights(weights, 0),
                                 {x, call.ends_e, scores_R, call.token_R, call.inverse});
    const kernels::ExpertsSaved& o = out.saved;
    raw::Tensors saved{x, scores_R, o.gate_RF, o.up_RF, o.low13_Rr, o.low2_Rr};
    saved.insert(saved.end(), weights.begin(), weights.end());
    const auto backward = [call, version = o.version](const raw::Tensors& s,
                                                      const raw::Tensors& dy) {
      auto g = kernels::experts_backward(
          call.config, call.weights(s, 6),
          {{s[0], call.ends_e, s[1], call.token_R, call.inverse}, s[2], s[3], s[4], s[5], version},
          dy[0].contiguous());
      if (!call.sink->is_empty())
        call.sink->leave([sink = call.sink, weights_of = std::move(g.weights_later)] {
          sink->give(listed(weights_of()));
        });
      if (call.sum) call.sum->add(std::exchange(g.x, {}));
      raw::Tensors all{g.x, g.scores_R};
      for (const at::Tensor& w : listed(g.weights)) all.push_back(w);
      return all;
    };
    return {{out.y}, std::move(saved), backward};
  })[0];
}

}  // namespace

void RoutedExpertsConfig::validate() const {
  MOESH_CHECK(num_experts >= 1 && dim >= 1 && ffn >= 1, ErrorKind::config, "experts: num_experts ",
              num_experts, ", dim ", dim, ", ffn ", ffn, "; each takes 1 or more");
  const int ranks = current_mesh().size(ep);
  MOESH_CHECK(num_experts % ranks == 0, ErrorKind::config, "experts: num_experts = ", num_experts,
              " is not divisible by ep = ", ranks,
              "; every rank of ep holds the same number of experts");
}

Experts::Experts(const RoutedExpertsConfig& config, const std::string& name, const ModuleOptions& o)
    : config_(config) {
  config.validate();
  const auto& mesh = current_mesh();
  const auto experts = config.num_experts, dim = config.dim, ffn = config.ffn;
  // FSDP shards the experts themselves, or, where there are fewer of them than ranks, what is
  // inside.
  const bool shards_inside = mesh.size(efsdp) * mesh.size(ep) > experts;
  const auto spec = [&](const std::string& part, std::vector<std::int64_t> shape, Cuts cuts,
                        std::int64_t inside = 1) {
    ParamSpec s = o.spec(name + "." + part, std::move(shape), std::move(cuts));
    s.storage_dim = shards_inside ? inside : 0;
    s.is_matrix = s.shape.size() == 3;
    return s;
  };
  const auto weight = [&](const std::string& part, std::vector<std::int64_t> shape,
                          std::int64_t cut) {
    ParamSpec s = spec(part, std::move(shape), {{ep, 0}, {etp, cut}});
    s.float8_tile = o.float8.experts;
    return Weight(s, o.init);
  };
  w1_ = weight("w1", {experts, ffn, dim}, 1);
  w3_ = weight("w3", {experts, ffn, dim}, 1);
  w2_ = weight("w2", {experts, dim, ffn}, 2);
  if (const auto l = o.lora(name + ".gate_up_proj"))
    gate_up_lora_ = {.scale = l->scale,
                     .a = Whole(spec("gate_up_proj" + std::string(kLoraA), {experts, l->rank, dim},
                                     {{ep, 0}}, 2),
                                init_of_a(dim, o.init)),
                     .b = Weight(spec("gate_up_proj" + std::string(kLoraB),
                                      {experts, 2, ffn, l->rank}, {{ep, 0}, {etp, 2}}, 2),
                                 init_of_b(*l, o.init))};
  if (const auto l = o.lora(name + ".down_proj"))
    down_lora_ = {
        .scale = l->scale,
        .a = Weight(spec("down_proj" + std::string(kLoraA), {experts, l->rank, ffn},
                         {{ep, 0}, {etp, 2}}, 2),
                    init_of_a(ffn, o.init)),
        .b = Whole(spec("down_proj" + std::string(kLoraB), {experts, dim, l->rank}, {{ep, 0}}),
                   init_of_b(*l, o.init))};
  if (!config.biases) return;
  const Init of_biases = o.bias_init.value_or(o.init);
  b1_.emplace(spec("b1", {experts, ffn}, {{ep, 0}, {etp, 1}}), of_biases);
  b3_.emplace(spec("b3", {experts, ffn}, {{ep, 0}, {etp, 1}}), of_biases);
  b2_.emplace(spec("b2", {experts, dim}, {{ep, 0}}), of_biases);
}

template <auto L>
auto Experts::run(const Tensor<L>& x, const Tensor<L>& scores_R, const at::Tensor& ends_e,
                  const at::Tensor& token_R, const at::Tensor& inverse) const {
  ExpertsCall call{.config = {.activation = config_.activation,
                              .scores = config_.scores,
                              .float8_tile = w1_.stored().spec.float8_tile},
                   .ends_e = ends_e,
                   .token_R = token_R,
                   .inverse = inverse};
  if (call.config.float8_tile > 0) {
    kernels::Float8Counts& counts = call.config.float8_counts = float8_counts(w1_.stored());
    counts.has_gradients = counts.has_inputs;  // those of y are whole where x is
  }
  const auto w1 = use(w1_), w3 = use(w3_), w2 = use(w2_);
  if (w1_.stored().float8)
    call.codes = {w1_.stored().float8->codes, w3_.stored().float8->codes,
                  w2_.stored().float8->codes};
  raw::Tensors weights(10);  // as `listed`
  weights[0] = local(w1), weights[1] = local(w3), weights[2] = local(w2);
  if (b1_) {
    weights[3] = local(use(*b1_)), weights[4] = local(use(*b3_));
    // The output is a partial sum over etp: its bias counts on one rank.
    weights[5] = local(once<etp>(use(*b2_)));
  }
  if (gate_up_lora_) {
    call.scale13 = gate_up_lora_->scale;
    weights[6] = local(use(gate_up_lora_->a)), weights[7] = local(use(gate_up_lora_->b));
  }
  if (down_lora_) {
    call.scale2 = down_lora_->scale;
    weights[8] = local(use(down_lora_->a)), weights[9] = local(use(down_lora_->b));
  }
  const bool needs_gradients = std::any_of(weights.begin(), weights.end(), [](const auto& w) {
    return w.defined() && w.requires_grad();
  });
  call.sum = raw::sum_for(local(x));
  call.sink = raw::sink_for(local(x), weights);
  const bool is_later = !call.sink->is_empty();
  // Frozen weights need no gradients.
  call.config.weights_later = is_later || !needs_gradients;
  for (at::Tensor& w : weights)
    if (is_later && w.defined()) w = w.detach();
  // The kernel is a linear layer after another, column and row.
  constexpr auto hidden = mix(Op::linear, L, decltype(w1)::layout);
  constexpr auto out = mix(Op::linear, hidden, decltype(w2)::layout);
  // The LoRA term has the placement of the output: also a partial sum over etp where the output is
  // one.
  constexpr auto in_part = decltype(use(w1_))::layout, in_whole = decltype(use(*b2_))::layout;
  static_assert(mix(Op::linear, mix(Op::linear, L, in_whole), in_part) == hidden);
  static_assert(mix(Op::linear, mix(Op::linear, hidden, in_part), in_whole) == out);
  return assume<out>(run_experts(call, local(x), local(scores_R), weights));
}

Tensor<Sparse{T, E, P}> Experts::apply_to_rows(const Tensor<Sparse{T, E, R}>& rows_RD,
                                               const Tensor<Sparse{T, E, R}>& scores_R,
                                               const kernels::Reordered& order) const {
  const auto sorted = permute_rows(scores_R, order.index_R, order.inverse_R);
  return run(rows_RD, sorted, order.ends_e, order.index_R, order.inverse_R.unsqueeze(1));
}

Tensor<Sparse{T, P, P}> Experts::apply_to_tokens(const Tensor<Sparse{T, R, R}>& x_ND,
                                                 const Tensor<Sparse{T, R, R}>& scores_NK,
                                                 const at::Tensor& experts_NK) const {
  const auto& mesh = current_mesh();
  const std::int64_t num_local = config_.num_experts / mesh.size(ep);
  const auto sorted = kernels::sort_by_expert(experts_NK, config_.num_experts,
                                              {mesh.coordinate(ep) * num_local, num_local});
  const auto scores_R = scores_of_rows(scores_NK, sorted);
  // T,E,P: the kernel has summed the rows of each token over this rank's experts.
  return as_term<ep>(run(x_ND, scores_R, sorted.ends_e, sorted.token_R, sorted.inverse_TK));
}

std::pair<at::Tensor, at::Tensor> swiglu_linear(const at::Tensor& gate, const at::Tensor& up,
                                                const at::Tensor& weight,
                                                const SwigluOptions& options,
                                                const OwnProducts& own) {
  const auto sink = raw::sink_for(gate, {weight});
  const at::Tensor w = sink->is_empty() ? weight : weight.detach();
  const auto forward = [&] {
    const bool is_unused = !options.needs_values && raw::is_second_run();
    at::Tensor y, h;
    if (options.wants_hidden || !is_unused) h = kernels::swiglu_forward(gate, up);
    if (is_unused) {
      auto sizes = gate.sizes().vec();
      sizes.back() = w.size(0);
      y = raw::not_computed(sizes, gate.options());
    } else {
      y = own ? own->forward(h, w) : at::linear(h, w);
    }
    return options.wants_hidden ? raw::Tensors{y, h} : raw::Tensors{y};
  };
  const auto backward = [sink, own, has_dw = w.requires_grad()](const raw::Tensors& saved,
                                                                const raw::Tensors& grads) {
    const at::Tensor &gate = saved[0], &up = saved[1], &w = saved[2];
    const at::Tensor rows = grads[0].flatten(0, -2);
    at::Tensor dh = own ? own->backward(rows, w) : rows.mm(w);
    if (grads.size() > 1) dh.add_(grads[1].flatten(0, -2));
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
  const auto out = raw::differentiable(
      {gate, up, w}, [&]() -> raw::Differentiable { return {forward(), {gate, up, w}, backward}; });
  return {out[0], options.wants_hidden ? out[1] : at::Tensor()};
}

}  // namespace moesh::nn
