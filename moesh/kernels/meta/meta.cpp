// The device meta: only shapes. Routed rows spread evenly over the experts.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "moesh/kernels/check.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/kernels/meta/work.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace meta {
namespace {

at::Tensor with_rows(const at::Tensor& like, std::int64_t rows) {
  auto shape = like.sizes().vec();
  shape[0] = rows;
  return at::empty(shape, like.options());
}

// Memory that the kernels of the CPU hold while they run, besides their results and a few hundred
// kilobytes for each thread: between two GEMMs `width` numbers for each row of a group of experts
// (at most half of the rows, and a few thousand), and in bfloat16 the sums of the tokens' outputs,
// in float32. Where the weights come later, all rows are held, and until then: `width` is 0.
std::vector<at::Tensor> between_gemms(const ExpertsInput& in, std::int64_t num_rows,
                                      std::int64_t width) {
  constexpr std::int64_t kMostRows = 8192;
  std::vector<at::Tensor> held{
      at::empty({std::min(num_rows / 2, kMostRows), width}, in.x.options())};
  if (in.token_R.defined() && in.x.scalar_type() == at::kBFloat16)
    held.push_back(at::empty(in.x.sizes(), in.x.options().dtype(at::kFloat)));
  return held;
}

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  const std::int64_t num_tokens = scores_TE.size(0);
  return {at::empty({num_tokens, k}, scores_TE.options()),
          at::empty({num_tokens, k}, scores_TE.options().dtype(at::kLong))};
}

at::Tensor int32s(at::IntArrayRef sizes) {
  return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(at::kInt));
}

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  const std::int64_t num_routed = experts_TK.numel();
  // On the host, where it can have values.
  const at::Tensor ends_e = at::empty({range.count}, at::kInt);
  std::int64_t num_rows = 0;
  for (std::int64_t e = 0; e < range.count; ++e) {
    num_rows += num_routed / num_experts + (range.first + e < num_routed % num_experts);
    ends_e.mutable_data_ptr<std::int32_t>()[e] = static_cast<std::int32_t>(num_rows);
  }
  return {.order_R = int32s({num_rows}),
          .token_R = int32s({num_rows}),
          .inverse_TK = int32s(experts_TK.sizes()),
          .ends_e = ends_e};
}

Reordered rank_major_to_expert_major(const at::Tensor& counts_re, at::Device /*device*/) {
  const at::Tensor ends_e = counts_re.sum(0).cumsum(0).to(at::kInt);
  const std::int64_t num_rows = counts_re.sum().item<std::int64_t>();
  return {.index_R = int32s({num_rows}), .inverse_R = int32s({num_rows}), .ends_e = ends_e};
}

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  const at::Tensor rows = with_rows(x, index_R.numel());
  note_pass({rows, rows});
  return rows;
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  const at::Tensor sums = with_rows(rows_RD, inverse_TK.size(0));
  note_pass({rows_RD, sums});
  return sums;
}

ExpertsOutput experts_forward(const ExpertsConfig& /*config*/, const ExpertsWeights& weights,
                              const ExpertsInput& input) {
  const std::int64_t num_rows = input.token_R.defined() ? input.token_R.size(0) : input.x.size(0),
                     F = weights.w1_eFD.size(1);
  const auto hidden = [&] { return at::empty({num_rows, F}, input.x.options()); };
  ExpertsOutput out{at::empty_like(input.x), {input, hidden(), hidden()}};
  const auto held = between_gemms(input, num_rows, F);
  return out;
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  ExpertsSaved saved, const at::Tensor& dy) {
  ExpertsGradients out;
  out.x = at::empty_like(saved.input.x);
  const std::int64_t num_rows = saved.gate_RF.size(0), F = saved.gate_RF.size(1);
  if (!config.weights_later) out.weights = empty_products(weights);
  out.weights.b1_eF = fresh(weights.b1_eF), out.weights.b3_eF = fresh(weights.b3_eF);
  if (config.scores != ScoreSide::none) out.scores_R = at::empty_like(saved.input.scores_R);
  const auto held = between_gemms(saved.input, num_rows, config.weights_later ? 0 : 3 * F);
  if (config.weights_later)
    out.weights_later = [input = saved.input, dy, biases = std::exchange(out.weights, {}),
                         shapes = shapes_of(weights),
                         kept = at::empty({3, num_rows, F}, saved.gate_RF.options())] {
      ExpertsWeights d = empty_products(shapes);
      d.b1_eF = biases.b1_eF, d.b3_eF = biases.b3_eF;
      return d;
    };
  return out;
}

// Memory that the kernels of an accelerator hold: bfloat16 is taken to run on the own kernels for
// Hopper unless `kernels.gpu` is library. Both kinds run on meta themselves, so that their
// temporaries are what is counted.
const KernelTable& of_accelerator_for(const ExpertsConfig& config, const ExpertsWeights& weights) {
  const KernelTable& own = hopper_kernels();
  const bool takes =
      gpu_kernels() != GpuKernels::library && own.refuses_experts(config, weights).empty();
  return takes ? own : aten_kernels();
}
const KernelTable& of_accelerator() {
  return gpu_kernels() == GpuKernels::library ? aten_kernels() : hopper_kernels();
}
// LibTorch's operations are noted where they are called.
bool is_own(const KernelTable& table) { return &table == &hopper_kernels(); }
ExpertsOutput accelerator_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  const ExpertsInput& input) {
  const KernelTable& table = of_accelerator_for(config, weights);
  ExpertsOutput out = table.experts_forward(config, weights, input);
  if (!is_own(table)) return out;
  const bool is_float8 = config.float8_tile > 0;
  const ExpertsWork work =
      work_of_experts(out.saved.gate_RF.size(0), weights.w1_eFD, is_float8 ? input.x.size(0) : 0);
  note_work(work.up), note_work(work.down);
  if (is_float8) note_work(work.codes_of_x), note_work(work.codes_of_hidden);
  if (is_float8 && !weights.codes.defined()) note_work(work.codes_of_weights);
  if (input.token_R.defined()) note_work(work.move);
  if (input.token_R.defined() && !is_float8) note_work(work.move);
  // LoRA's products are passes over the rows; the hidden states are as wide as the gates.
  if (weights.lora.a13_erD.defined()) note_pass({input.x, out.saved.low13_Rr});
  if (weights.lora.a2_erF.defined()) note_pass({out.saved.gate_RF, out.saved.low2_Rr});
  return out;
}
ExpertsGradients accelerator_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                      ExpertsSaved saved, const at::Tensor& dy) {
  const KernelTable& table = of_accelerator_for(config, weights);
  const bool is_float8 = config.float8_tile > 0;
  const ExpertsWork work =
      work_of_experts(saved.gate_RF.size(0), weights.w1_eFD, is_float8 ? saved.input.x.size(0) : 0);
  const bool moves_rows = saved.input.token_R.defined();
  const at::Tensor x = saved.input.x, gate_RF = saved.gate_RF;
  ExpertsGradients d = table.experts_backward(config, weights, std::move(saved), dy);
  if (!is_own(table)) return d;
  const auto note_weights = [work, moves_rows] {
    note_work(work.dw2), note_work(work.dw13);
    if (moves_rows) note_work(work.move);
  };
  note_work(work.dh), note_work(work.dx);
  if (is_float8) note_work(work.codes_of_dy), note_work(work.codes_of_d_hidden);
  if (is_float8 && !weights.codes.defined()) note_work(work.codes_of_weights);
  if (moves_rows) note_work(work.move), note_work(is_float8 ? work.write_rows : work.move);
  if (weights.lora.any()) {  // the weights themselves are frozen
    if (weights.lora.a13_erD.defined()) note_pass({gate_RF, gate_RF}), note_pass({x});
    if (weights.lora.a2_erF.defined()) note_pass({dy}), note_pass({gate_RF});
    return d;
  }
  if (!d.weights_later) {
    note_weights();
    return d;
  }
  d.weights_later = [later = std::move(d.weights_later), note_weights] {
    note_weights();
    return later();
  };
  return d;
}
at::Tensor pack_float8(const at::Tensor& rows_RD, std::int64_t tile) {
  const at::Tensor packed_RW = of_accelerator().pack_float8(rows_RD, tile);
  if (is_own(of_accelerator())) note_pass({rows_RD, packed_RW});
  return packed_RW;
}
at::Tensor unpack_float8(const at::Tensor& packed_RW, std::int64_t width, std::int64_t tile,
                         at::ScalarType dtype) {
  const at::Tensor rows_RD = of_accelerator().unpack_float8(packed_RW, width, tile, dtype);
  if (is_own(of_accelerator())) note_pass({packed_RW, rows_RD});
  return rows_RD;
}
bool takes_float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN, std::int64_t tile) {
  const KernelTable& table = of_accelerator();
  return is_own(table) && table.takes_float8_product(rows_MK, w_KN, tile);
}
// The rows are rounded for every product.
at::Tensor noted_product(const at::Tensor& rows, const at::Tensor& y) {
  const auto codes = static_cast<double>(rows.numel()), width = static_cast<double>(y.size(1)),
             of_weight = static_cast<double>(rows.size(1)) * width;
  note_work({WorkKind::pass, 0, static_cast<double>(rows.nbytes()) + codes});
  note_work({WorkKind::float8_dense, 2 * codes * width,
             codes + of_weight + static_cast<double>(y.nbytes())});
  return y;
}
at::Tensor accelerator_float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN,
                                      std::int64_t tile) {
  const auto numbers = static_cast<double>(w_KN.numel());
  note_work({WorkKind::large_pass, 0, static_cast<double>(w_KN.nbytes()) + numbers});
  return noted_product(rows_MK, of_accelerator().float8_product(rows_MK, w_KN, tile));
}
at::Tensor accelerator_float8_product_with(const at::Tensor& rows, const WeightCodes& w,
                                           bool transposed) {
  return noted_product(rows, of_accelerator().float8_product_with(rows, w, transposed));
}
void write_weight_codes(const WeightCodes& to, const at::Tensor& w) {
  note_work({WorkKind::pass_of_step, 0,
             static_cast<double>(w.nbytes() + to.codes.nbytes() + to.transposed.nbytes())});
}

// The gate has three bfloat16 terms in forward; in backward d(logits) has two, for both products.
void note_gate(const at::Tensor& x_TD, const at::Tensor& gate_ED, double num_terms) {
  if (!is_own(of_accelerator())) return;
  const auto num_tokens = static_cast<double>(x_TD.size(0));
  note_work(
      {WorkKind::dense, 2 * num_terms * num_tokens * static_cast<double>(gate_ED.numel()),
       static_cast<double>(x_TD.nbytes()) + 4 * num_tokens * static_cast<double>(gate_ED.size(0))});
}
at::Tensor accelerator_gate_forward(const at::Tensor& x_TD, const at::Tensor& gate_ED) {
  note_gate(x_TD, gate_ED, 3);
  return of_accelerator().gate_forward(x_TD, gate_ED);
}
GateGradients accelerator_gate_backward(const at::Tensor& x_TD, const at::Tensor& gate_ED,
                                        const at::Tensor& d_logits_TE, bool as_product) {
  note_gate(x_TD, gate_ED, 2), note_gate(x_TD, gate_ED, 2);
  return of_accelerator().gate_backward(x_TD, gate_ED, d_logits_TE, as_product);
}

// As DeltaNet::flops counts them.
void note_delta_rule(const DeltaRuleInput& in, std::int64_t chunk, double times) {
  if (!is_own(of_accelerator())) return;
  const auto C = static_cast<double>(chunk), d = static_cast<double>(in.key_dim),
             v = static_cast<double>(in.value_dim());
  const double flops = 4 * C * d + C * (d + v) + 2 * C * v + 6 * d * v;
  note_work({WorkKind::delta_rule, times * flops * static_cast<double>(in.beta_BLh.numel()), 0});
}
DeltaRuleOutput accelerator_rule_forward(const DeltaRuleInput& in, std::int64_t chunk) {
  note_delta_rule(in, chunk, 1);
  return of_accelerator().delta_rule_forward(in, chunk);
}
DeltaRuleGradients accelerator_rule_backward(const DeltaRuleInput& in, const at::Tensor& dy_BLhv,
                                             std::int64_t chunk) {
  note_delta_rule(in, chunk, 2);
  return of_accelerator().delta_rule_backward(in, dy_BLhv, chunk);
}
at::Tensor accelerator_convolution_forward(const at::Tensor& x, const at::Tensor& w,
                                           const at::Tensor& starts_BL) {
  if (is_own(of_accelerator())) note_pass({x, x});
  return of_accelerator().convolution_forward(x, w, starts_BL);
}
ConvolutionGradients accelerator_convolution_backward(const at::Tensor& x, const at::Tensor& w,
                                                      const at::Tensor& starts_BL,
                                                      const at::Tensor& dy) {
  if (is_own(of_accelerator())) note_pass({x, dy, x});
  return of_accelerator().convolution_backward(x, w, starts_BL, dy);
}

// The kernels of an accelerator: results, and no temporaries.
NormOutput norm_forward(const at::Tensor& x, const at::Tensor& /*weight_D*/, double /*eps*/,
                        const std::optional<Rotation>& /*turn*/) {
  note_pass({x, x});
  return {fresh(x), at::empty(x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)),
                              x.options().dtype(wide(x)))};
}
NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D,
                            const at::Tensor& /*r*/, const at::Tensor& dy,
                            const std::optional<Rotation>& /*turn*/, const at::Tensor& beside) {
  note_pass({x, dy, beside, x});
  return {fresh(x), fresh(weight_D)};
}
at::Tensor rotate(const Rotation& r, const at::Tensor& x_BLhd, Argument argument) {
  const bool is_in_place = argument == Argument::consumed && 2 * r.cos_Pf.size(1) < x_BLhd.size(3);
  const at::Tensor turned = is_in_place ? x_BLhd.narrow(3, 0, 2 * r.cos_Pf.size(1)) : x_BLhd;
  note_pass({turned, turned});
  return is_in_place ? x_BLhd : fresh(x_BLhd);
}

LogitSums logit_sums(const at::Tensor& logits_NV, const at::Tensor& /*label_N*/) {
  note_pass({logits_NV});
  const auto fresh = [&] {
    return at::empty({logits_NV.size(0)}, logits_NV.options().dtype(wide(logits_NV)));
  };
  return {fresh(), fresh(), fresh()};
}
at::Tensor logit_gradient_(const at::Tensor& logits_NV, const at::Tensor& /*label_N*/,
                           const at::Tensor& /*total_N*/, const at::Tensor& /*weight_N*/) {
  note_pass({logits_NV, logits_NV});
  return logits_NV;
}

at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& /*sinks_h*/) {
  note_pass({y, y});
  return at::empty_like(lse);
}
at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& /*lse*/, const at::Tensor& sinks_h,
                         const at::Tensor& dy) {
  note_pass({y, dy});
  return at::empty_like(sinks_h);
}

at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  note_pass({gate, up, gate});
  return at::empty_like(gate);
}
SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dh,
                                bool wants_h) {
  note_pass({gate, up, dh, gate, up, wants_h ? dh : at::Tensor()});
  return {at::empty_like(gate), at::empty_like(gate), wants_h ? dh : at::Tensor()};
}

void adamw_(const AdamWNumbers& /*numbers*/, const std::vector<AdamWParam>& /*params*/) {}
at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors) {
  return at::empty({}, tensors[0].options().dtype(at::kDouble));
}

AttentionOutput attention_forward(const AttentionConfig& /*config*/, const AttentionInput& in) {
  const auto &q = in.q_BLhd, &v = in.v_BSgv;
  return {at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(wide(q)))};
}

AttentionGradients attention_backward(const AttentionConfig& /*config*/, const AttentionInput& in,
                                      const AttentionOutput& /*output*/,
                                      const at::Tensor& /*dy_BLhv*/) {
  return {fresh(in.q_BLhd), fresh(in.k_BSgd), fresh(in.v_BSgv), fresh(in.sinks_h)};
}

}  // namespace
}  // namespace meta

const KernelTable& meta_kernels() {
  static const KernelTable of_cpu = [] {
    KernelTable t = aten_kernels();
    t.name = "meta";
    t.top_k = meta::top_k;
    t.sort_by_expert = meta::sort_by_expert;
    t.rank_major_to_expert_major = meta::rank_major_to_expert_major;
    t.gather_rows = meta::gather_rows;
    t.combine_rows = meta::combine_rows;
    t.experts_forward = meta::experts_forward;
    t.experts_backward = meta::experts_backward;
    t.refuses_experts = plain_experts_only;
    t.adamw_ = meta::adamw_;
    t.sum_of_squares = meta::sum_of_squares;
    t.attention_forward = meta::attention_forward;
    t.attention_backward = meta::attention_backward;
    return t;
  }();
  static const KernelTable of_accelerator = [] {
    KernelTable t = of_cpu;
    t.experts_forward = meta::accelerator_forward;
    t.experts_backward = meta::accelerator_backward;
    t.refuses_experts = nullptr;
    t.pack_float8 = meta::pack_float8, t.unpack_float8 = meta::unpack_float8;
    t.float8_product = meta::accelerator_float8_product;
    t.takes_float8_product = meta::takes_float8_product;
    t.float8_product_with = meta::accelerator_float8_product_with;
    t.write_weight_codes = meta::write_weight_codes;
    t.gate_forward = meta::accelerator_gate_forward;
    t.gate_backward = meta::accelerator_gate_backward;
    t.delta_rule_forward = meta::accelerator_rule_forward;
    t.delta_rule_backward = meta::accelerator_rule_backward;
    t.convolution_forward = meta::accelerator_convolution_forward;
    t.convolution_backward = meta::accelerator_convolution_backward;
    t.norm_forward = meta::norm_forward, t.norm_backward = meta::norm_backward;
    t.rotate_forward = t.rotate_backward = meta::rotate;
    t.swiglu_forward = meta::swiglu_forward, t.swiglu_backward = meta::swiglu_backward;
    t.add_sinks_ = meta::add_sinks_, t.sink_gradient = meta::sink_gradient;
    t.logit_sums = meta::logit_sums, t.logit_gradient_ = meta::logit_gradient_;
    t.attention_forward = nullptr, t.attention_backward = nullptr;
    return t;
  }();
  return meta::modelled_device() == at::kCPU ? of_cpu : of_accelerator;
}

}  // namespace moesh::kernels
