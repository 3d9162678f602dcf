#include "moesh/nn/experts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "moesh/base/error.h"
#include "moesh/nn/rows.h"
#include "moesh/spmd/dtype.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/recompute.h"
#include "moesh/spmd/transitions.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::nn {
namespace {

using enum Place;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<at::Tensor>;

// What backward has to know besides tensors.
struct Call : torch::CustomClassHolder {
  kernels::ExpertsConfig config;
  at::Tensor ends_e;
  std::uint32_t saved_version = 0;
  c10::intrusive_ptr<raw::WeightSink> sink;
};

// Forward and backward by hand: saved are the input rows, the pre-activations, the indices and the
// scores, and the weights.
class ExpertsFunction : public torch::autograd::Function<ExpertsFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& scores_R, const at::Tensor& w1, const at::Tensor& w3,
                            const at::Tensor& w2, const MaybeTensor& b1, const MaybeTensor& b3,
                            const MaybeTensor& b2, const at::Tensor& token_R,
                            const at::Tensor& inverse, const c10::intrusive_ptr<Call>& call) {
    const kernels::ExpertsWeights weights{w1,
                                          w3,
                                          w2,
                                          b1.value_or(at::Tensor()),
                                          b3.value_or(at::Tensor()),
                                          b2.value_or(at::Tensor())};
    const auto out = run(*call, weights, {x, call->ends_e, scores_R, token_R, inverse});
    call->saved_version = out.saved.version;
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->save_for_backward({x, scores_R, token_R, inverse, out.saved.gate_RF, out.saved.up_RF,
                                w1, w3, w2, weights.b1_eF, weights.b3_eF, weights.b2_eD});
    return out.y;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto call =
        c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    const auto s = context->get_saved_variables();
    const kernels::ExpertsWeights weights{s[6], s[7], s[8], s[9], s[10], s[11]};
    auto g = kernels::experts_backward(
        call->config, weights,
        {{s[0], call->ends_e, s[1], s[2], s[3]}, s[4], s[5], call->saved_version},
        grads[0].contiguous());
    if (g.weights_later)
      raw::later([sink = call->sink, weights_of = std::move(g.weights_later)] {
        const auto w = weights_of();
        sink->give({w.w1_eFD, w.w3_eFD, w.w2_eDF, w.b1_eF, w.b3_eF, w.b2_eD});
      });
    const auto& w = g.weights;
    return {g.x,     g.scores_R, w.w1_eFD,     w.w3_eFD,     w.w2_eDF,    w.b1_eF,
            w.b3_eF, w.b2_eD,    at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  static kernels::ExpertsOutput run(const Call& call, const kernels::ExpertsWeights& weights,
                                    const kernels::ExpertsInput& input) {
    if (auto first = raw::recall("pre-activations of experts")) {
      const at::Tensor &gate = (*first)[0], &up = (*first)[1];
      return {raw::not_computed(input.x.sizes(), input.x.options()),
              {input, gate, up, static_cast<std::uint32_t>(gate._version())}};
    }
    auto out = kernels::experts_forward(call.config, weights, input);
    raw::keep("pre-activations of experts", {out.saved.gate_RF, out.saved.up_RF});
    return out;
  }
};

}  // namespace

void RoutedExpertsConfig::validate() const {
  MOESH_CHECK(num_experts >= 1 && dim >= 1 && ffn >= 1, ErrorKind::config, "experts: num_experts ",
              num_experts, ", dim ", dim, ", ffn ", ffn, "; each takes 1 or more");
  const int ranks = current_mesh().size(ep);
  MOESH_CHECK(num_experts % ranks == 0, ErrorKind::config, "experts: num_experts = ", num_experts,
              " do not divide by ep = ", ranks,
              "; every rank of ep holds the same number of experts");
}

Experts::Experts(const RoutedExpertsConfig& config, const std::string& name, at::ScalarType dtype,
                 at::Device device, const Init& init, const std::optional<Init>& bias_init)
    : config_(config) {
  config.validate();
  const auto& mesh = current_mesh();
  const auto experts = config.num_experts, dim = config.dim, ffn = config.ffn;
  // FSDP shards the experts themselves, or, where there are fewer of them than ranks, what is
  // inside.
  const std::int64_t storage_dim = mesh.size(efsdp) * mesh.size(ep) > experts ? 1 : 0;
  const auto spec = [&](const char* part, std::vector<std::int64_t> shape,
                        std::vector<std::pair<Axes, std::int64_t>> cuts) {
    return ParamSpec{.name = name + "." + part,
                     .shape = std::move(shape),
                     .cuts = std::move(cuts),
                     .storage_dim = storage_dim,
                     .dtype = wide_dtype(dtype),
                     .compute = dtype,
                     .device = device};
  };
  w1_ = Weight(spec("w1", {experts, ffn, dim}, {{ep, 0}, {etp, 1}}), init);
  w3_ = Weight(spec("w3", {experts, ffn, dim}, {{ep, 0}, {etp, 1}}), init);
  w2_ = Weight(spec("w2", {experts, dim, ffn}, {{ep, 0}, {etp, 2}}), init);
  if (!config.biases) return;
  const Init of_biases = bias_init.value_or(init);
  b1_.emplace(spec("b1", {experts, ffn}, {{ep, 0}, {etp, 1}}), of_biases);
  b3_.emplace(spec("b3", {experts, ffn}, {{ep, 0}, {etp, 1}}), of_biases);
  b2_.emplace(spec("b2", {experts, dim}, {{ep, 0}}), of_biases);
}

template <auto L>
auto Experts::run(const Tensor<L>& x, const Tensor<L>& scores_R, const at::Tensor& ends_e,
                  const at::Tensor& token_R, const at::Tensor& inverse) const {
  auto call = c10::make_intrusive<Call>();
  call->config = {.activation = config_.activation, .scores = config_.scores};
  call->ends_e = ends_e;
  const auto w1 = use(w1_), w3 = use(w3_), w2 = use(w2_);
  MaybeTensor b1, b3, b2;
  if (b1_) {
    b1 = local(use(*b1_)), b3 = local(use(*b3_));
    // The output is a partial sum over etp: its bias counts on one rank.
    b2 = local(once<etp>(use(*b2_)));
  }
  const auto value = [](const MaybeTensor& t) { return t.value_or(at::Tensor()); };
  call->sink =
      raw::sink_for(local(x), {local(w1), local(w3), local(w2), value(b1), value(b3), value(b2)});
  const bool is_later = !call->sink->is_empty();
  call->config.weights_later = is_later;
  const auto given = [is_later](const at::Tensor& w) { return is_later ? w.detach() : w; };
  for (MaybeTensor* b : {&b1, &b3, &b2})
    if (*b) *b = given(**b);
  // The kernel is a linear layer after another, column and row.
  constexpr auto hidden = mix(Op::linear, L, decltype(w1)::layout);
  constexpr auto out = mix(Op::linear, hidden, decltype(w2)::layout);
  return assume<out>(ExpertsFunction::apply(local(x), local(scores_R), given(local(w1)),
                                            given(local(w3)), given(local(w2)), b1, b3, b2, token_R,
                                            inverse, call));
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
  const auto scores_R =
      permute_rows(flatten(scores_NK, 0, 1), sorted.order_R, sorted.inverse_TK.flatten());
  // T,E,P: the kernel has summed the rows of each token over this rank's experts.
  return as_term<ep>(run(x_ND, scores_R, sorted.ends_e, sorted.token_R, sorted.inverse_TK));
}

}  // namespace moesh::nn
