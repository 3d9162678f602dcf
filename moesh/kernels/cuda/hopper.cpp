// The torch side of the kernels for Hopper, experts and gate: allocates, and calls launch.h.
// Nothing here waits for the device. Both take tensors on meta, too: what is allocated is the same,
// and nothing is called. T tokens, D model, F ffn, E experts, e local experts, K top-k, R rows at
// their experts

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/kernels/cuda/float8.h"
#include "moesh/kernels/cuda/on_device.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace hopper {

namespace {

/// Rows in float8.
struct RowCodes {
  at::Tensor codes, scales;

  static RowCodes empty(std::int64_t num_rows, std::int64_t width, const at::TensorOptions& o) {
    return {at::empty({num_rows, width}, o.dtype(at::kByte)),
            at::empty({float8_tiles(width), scale_pitch(num_rows)}, o.dtype(at::kFloat))};
  }
  operator Float8Rows() const { return {out(codes), floats(scales)}; }
};

void write_weight_codes(const kernels::WeightCodes& to, const at::Tensor& w) {
  const at::Tensor from = aligned(w);
  OnDeviceOf{w}("float8_weight", cuda::float8_weight, in(from), w.scalar_type() == at::kFloat,
                out(to.codes), out(to.transposed), floats(to.scales),
                w.dim() > 2 ? w.size(0) : std::int64_t{1}, w.size(-2), w.size(-1));
}

at::Tensor pack_float8(const at::Tensor& rows_RD, std::int64_t tile) {
  const std::int64_t R = rows_RD.size(0), D = rows_RD.size(1);
  if (tile != kFloat8Tile || rows_RD.scalar_type() != at::kBFloat16)
    return aten_kernels().pack_float8(rows_RD, tile);
  const at::Tensor from = aligned(rows_RD), packed_RW = at::empty({R, packed_row_bytes(D) / 8},
                                                                  from.options().dtype(at::kLong));
  OnDeviceOf{from}("pack8", pack8, in(from), out(packed_RW), R, D);
  return packed_RW;
}

at::Tensor unpack_float8(const at::Tensor& packed_RW, std::int64_t width, std::int64_t tile,
                         at::ScalarType dtype) {
  if (tile != kFloat8Tile || dtype != at::kBFloat16)
    return aten_kernels().unpack_float8(packed_RW, width, tile, dtype);
  const std::int64_t R = packed_RW.size(0);
  const at::Tensor rows_RD = at::empty({R, width}, packed_RW.options().dtype(dtype));
  OnDeviceOf{packed_RW}("unpack8", unpack8, in(packed_RW), out(rows_RD), R, width);
  return rows_RD;
}

/// A weight in float8, or its transposed: what was kept, or made now of the one that is wanted.
struct CodedWeight {
  WeightCodes made;
  bool transposed;

  CodedWeight(const at::Tensor& w, const WeightCodes& kept, bool is_transposed)
      : made(kept), transposed(is_transposed) {
    if (made.scales.defined()) return;
    made = empty_weight_codes(w, !transposed, transposed);
    hopper::write_weight_codes(made, w);
  }
  operator Float8Weight() const {
    return {in(transposed ? made.transposed : made.codes), floats(made.scales), transposed};
  }
};

/// The experts of one call. Rows at their experts share one buffer: x, then y; dy, then dx, then x.
class ExpertsCall {
 public:
  ExpertsCall(const ExpertsConfig& config, const ExpertsWeights& w, const ExpertsInput& input,
              std::int64_t num_rows)
      : config_(config),
        is_float8_(config.float8_tile > 0),
        run_(input.x),
        input_{aligned(input.x), input.ends_e, input.scores_R, input.token_R, input.inverse_TK},
        weights_(mapped(w, aligned)),
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
                 .b2_ED = in(weights_.b2_eD),
                 .frozen = w.lora.any()} {
    if (gathered()) rows_RD_ = empty_rows();
  }

  ExpertsOutput forward(const ExpertsInput& given) {
    const at::Tensor gate_RF = empty_hidden(), up_RF = empty_hidden();
    if (is_float8_) return {at_tokens(float8_forward(gate_RF, up_RF)), {given, gate_RF, up_RF}};
    const ExpertsLora& l = weights_.lora;
    const at::Tensor act_RF = empty_hidden();
    const at::Tensor low13_Rr = low_rows(l.a13_erD, l.scale13, {input_.x}, Rows::tokens);
    run_("up", up, with(low13_Rr, l.b13_e2Fr), in(at_experts(input_.x)), out(gate_RF), out(up_RF),
         out(act_RF));
    const at::Tensor y_RD = gathered() ? rows_RD_ : empty_rows();
    const at::Tensor low2_Rr = low_rows(l.a2_erF, l.scale2, {act_RF}, Rows::at_experts);
    run_("down", down, with(low2_Rr, l.b2_eDr), in(act_RF), out(y_RD));
    return {at_tokens(y_RD), {given, gate_RF, up_RF, low13_Rr, low2_Rr}};
  }

  /// The saved gate_RF and up_RF become their gradients. The gradients of the weights get their
  /// memory when they are made: those of w1 and w3 after the hidden state is gone. With LoRA only
  /// its own are made.
  ExpertsGradients backward(const ExpertsSaved& saved, const at::Tensor& given_dy,
                            at::Tensor* hidden_RF) {
    const at::Tensor dy = aligned(given_dy);
    const at::Tensor &gate_RF = saved.gate_RF, &up_RF = saved.up_RF;
    const ExpertsLora& l = weights_.lora;
    ExpertsGradients d;
    ExpertsLora& d_lora = d.weights.lora;
    const bool frozen = experts_.frozen;
    if (!frozen) {
      d.weights.b1_eF = fresh(weights_.b1_eF), d.weights.b3_eF = fresh(weights_.b3_eF);
      d.weights.b2_eD = fresh(weights_.b2_eD);
    }
    {
      const at::Tensor d_low2_Rr =
          low_gradient(l.b2_eDr, saved.low2_Rr, l.scale2, {dy}, Rows::tokens, d_lora.b2_eDr);
      const at::Tensor act_RF = empty_hidden();
      at::Tensor dy_RD, terms;
      if (input_.scores_R.defined()) {
        terms = at::empty({num_score_terms(experts_.ffn), experts_.num_rows},
                          input_.scores_R.options());
        d.scores_R = at::empty_like(input_.scores_R);
      }
      if (is_float8_) {
        dy_RD = float8_dh(dy, gate_RF, up_RF, act_RF, terms);
        count_float8_experts(config_, input_, act_RF, dy, gate_RF, up_RF);
      } else {
        dy_RD = at_experts(dy);
        run_("dh", dh, with(d_low2_Rr, l.a2_erF), in(dy_RD), out(gate_RF), out(up_RF), out(act_RF),
             floats(terms));
      }
      if (terms.defined())
        run_("score_gradient", score_gradient, experts_, in(dy_RD), read_floats(terms),
             floats(d.scores_R));
      if (frozen)
        d_lora.a2_erF = gradient_of_a(l.a2_erF, d_low2_Rr, act_RF, Rows::at_experts);
      else if (hidden_RF)
        *hidden_RF = act_RF;
      else
        d.weights.w2_eDF = gradient_of_w2(dy_RD, act_RF);
      if (!frozen &&
          (weights_.b1_eF.defined() || weights_.b3_eF.defined() || weights_.b2_eD.defined())) {
        const at::Tensor sums = at::empty({num_bias_terms(experts_.num_rows, experts_.num_experts),
                                           std::max(experts_.model, experts_.ffn)},
                                          dy.options().dtype(at::kFloat));
        run_("bias_gradients", bias_gradients, experts_, in(dy_RD), out(gate_RF), out(up_RF),
             floats(sums), out(d.weights.b1_eF), out(d.weights.b3_eF), out(d.weights.b2_eD));
      }
    }
    const at::Tensor d_low13_Rr = low_gradient(l.b13_e2Fr, saved.low13_Rr, l.scale13,
                                               {gate_RF, up_RF}, Rows::at_experts, d_lora.b13_e2Fr);
    const at::Tensor dx_RD = gathered() ? rows_RD_ : empty_rows();
    if (is_float8_)
      float8_dx(dx_RD);
    else
      run_("dx", dx, with(d_low13_Rr, l.a13_erD), in(gate_RF), in(up_RF), out(dx_RD));
    d.x = at_tokens(dx_RD);
    if (frozen)
      d_lora.a13_erD = gradient_of_a(l.a13_erD, d_low13_Rr, input_.x, Rows::tokens);
    else if (!hidden_RF)
      gradients_of_w1_and_w3(gate_RF, up_RF, d.weights);
    return d;
  }

  /// The gradients of the weights, for a backward that gave its hidden state away. Of this call's
  /// weights only the sizes are used.
  ExpertsWeights weight_half(const at::Tensor& d_gate_RF, const at::Tensor& d_up_RF,
                             const at::Tensor& hidden_RF, const at::Tensor& dy) {
    ExpertsWeights d;
    d.w2_eDF = gradient_of_w2(at_experts(dy), hidden_RF);
    gradients_of_w1_and_w3(d_gate_RF, d_up_RF, d);
    return d;
  }

 private:
  at::Tensor gradient_of_w2(const at::Tensor& dy_RD, const at::Tensor& hidden_RF) const {
    const at::Tensor d = fresh(weights_.w2_eDF);
    run_("dw2", dw2, experts_, in(dy_RD), in(hidden_RF), out(d), out(for_chunks()));
    return d;
  }
  void gradients_of_w1_and_w3(const at::Tensor& d_gate_RF, const at::Tensor& d_up_RF,
                              ExpertsWeights& d) const {
    d.w1_eFD = fresh(weights_.w1_eFD), d.w3_eFD = fresh(weights_.w3_eFD);
    run_("dw13", dw13, experts_, in(at_experts(input_.x)), in(d_gate_RF), in(d_up_RF),
         out(d.w1_eFD), out(d.w3_eFD), out(for_chunks()));
  }
  /// The experts of a product to which LoRA adds low_Rr times `matrix`, if there is any.
  GroupedExperts with(const at::Tensor& low_Rr, const at::Tensor& matrix) const {
    GroupedExperts e = experts_;
    if (low_Rr.defined()) e.added = {in(low_Rr), in(matrix), low_Rr.size(1)};
    return e;
  }
  /// What rows are: those of tokens, which the experts' rows point to, or those of the experts.
  enum class Rows { tokens, at_experts };
  LowRank low_rank_of(std::int64_t rank, std::initializer_list<at::Tensor> tensors,
                      Rows rows) const {
    LowRank l{.num_rows = experts_.num_rows,
              .num_experts = experts_.num_experts,
              .ends_E = experts_.ends_E,
              .rank = rank,
              .width = tensors.begin()->size(1),
              .num_parts = static_cast<std::int64_t>(tensors.size()),
              .rows = {},
              .token_R = rows == Rows::tokens ? indices(input_.token_R) : nullptr};
    std::transform(tensors.begin(), tensors.end(), l.rows,
                   [](const at::Tensor& t) { return in(t); });
    return l;
  }
  at::Tensor empty_low(std::int64_t rank) const {
    return at::empty({experts_.num_rows, rank}, input_.x.options());
  }
  at::Tensor low_rows(const at::Tensor& a_erX, double scale,
                      std::initializer_list<at::Tensor> tensors, Rows rows) const {
    if (!a_erX.defined()) return {};
    const at::Tensor low_Rr = empty_low(a_erX.size(1));
    run_("low_rank", low_rank, low_rank_of(a_erX.size(1), tensors, rows), in(a_erX),
         static_cast<float>(scale), out(low_Rr));
    return low_Rr;
  }
  /// From the gradient of a product to which LoRA adds b times low_Rr: that of b, and that of what
  /// a gives, before the scale.
  at::Tensor low_gradient(const at::Tensor& b, const at::Tensor& low_Rr, double scale,
                          std::initializer_list<at::Tensor> tensors, Rows rows,
                          at::Tensor& d_b) const {
    if (!b.defined()) return {};
    const LowRank l = low_rank_of(low_Rr.size(1), tensors, rows);
    const at::Tensor d_low_Rr = empty_low(l.rank),
                     sums = at::empty({low_rank_workspace(l, true)}, b.options().dtype(at::kFloat));
    d_b = fresh(b);
    run_("low_rank_db", low_rank_db, l, in(b), in(low_Rr), static_cast<float>(scale), floats(sums),
         out(d_b), out(d_low_Rr));
    return d_low_Rr;
  }
  at::Tensor gradient_of_a(const at::Tensor& a, const at::Tensor& d_low_Rr, const at::Tensor& x,
                           Rows rows) const {
    if (!a.defined()) return {};
    const LowRank l = low_rank_of(a.size(1), {x}, rows);
    const at::Tensor d = fresh(a), sums = at::empty({low_rank_workspace(l, false)},
                                                    a.options().dtype(at::kFloat));
    run_("low_rank_da", low_rank_da, l, in(d_low_Rr), floats(sums), out(d));
    return d;
  }
  at::Tensor for_chunks() const {
    return at::empty({chunk_workspace(experts_.num_rows, experts_.model, experts_.ffn)},
                     input_.x.options().dtype(at::kByte));
  }
  // ---- in float8 ----

  at::Tensor float8_forward(const at::Tensor& gate_RF, const at::Tensor& up_RF) {
    {
      const RowCodes x = row_codes(input_.x, {});
      multiply({.width = experts_.ffn,
                .depth = experts_.model,
                .a = {x},
                .b = {CodedWeight(weights_.w1_eFD, weights_.codes.w1, false),
                      CodedWeight(weights_.w3_eFD, weights_.codes.w3, false)},
                .out = {out(gate_RF), out(up_RF)}});
    }
    const RowCodes act = empty_codes(experts_.ffn);
    run_("act8", act8, experts_, in(gate_RF), in(up_RF), Float8Rows(act));
    const at::Tensor y_RD = gathered() ? rows_RD_ : empty_rows();
    multiply({.width = experts_.model,
              .depth = experts_.ffn,
              .a = {act},
              .b = {CodedWeight(weights_.w2_eDF, weights_.codes.w2, false)},
              .out = {out(y_RD)},
              .bias = experts_.b2_ED,
              .score = experts_.score_before ? nullptr : experts_.score_R});
    return y_RD;
  }
  /// Returns the rows of dy; the codes of d_gate and d_up wait for float8_dx.
  at::Tensor float8_dh(const at::Tensor& dy, const at::Tensor& gate_RF, const at::Tensor& up_RF,
                       const at::Tensor& act_RF, const at::Tensor& terms) {
    const at::Tensor dy_RD = gathered() ? rows_RD_ : aligned(dy);
    multiply({.width = experts_.ffn,
              .depth = experts_.model,
              .a = {row_codes(aligned(dy), gathered() ? dy_RD : at::Tensor())},
              .b = {CodedWeight(weights_.w2_eDF, weights_.codes.w2, true)},
              .out = {out(act_RF)}});
    d_gate_ = empty_codes(experts_.ffn), d_up_ = empty_codes(experts_.ffn);
    run_("dh8", dh8, experts_, out(act_RF), out(gate_RF), out(up_RF), Float8Rows(d_gate_),
         Float8Rows(d_up_), floats(terms));
    return dy_RD;
  }
  void float8_dx(const at::Tensor& dx_RD) {
    multiply({.width = experts_.model,
              .depth = experts_.ffn,
              .a = {d_gate_, d_up_},
              .b = {CodedWeight(weights_.w1_eFD, weights_.codes.w1, true),
                    CodedWeight(weights_.w3_eFD, weights_.codes.w3, true)},
              .out = {out(dx_RD)}});
    d_gate_ = d_up_ = {};
  }
  void multiply(Float8Product p) const {
    p.num_rows = experts_.num_rows, p.num_experts = experts_.num_experts,
    p.ends_E = experts_.ends_E;
    run_("float8_product", cuda::float8_product, p);
  }
  RowCodes empty_codes(std::int64_t width) const {
    return RowCodes::empty(experts_.num_rows, width, input_.x.options());
  }
  /// x [T, D] at its experts, and where rows_RD is given the numbers themselves.
  RowCodes row_codes(const at::Tensor& x, const at::Tensor& rows_RD) const {
    const RowCodes codes = empty_codes(experts_.model);
    run_("expand8", expand8, in(x), indices(input_.inverse_TK), out(rows_RD), Float8Rows(codes),
         x.size(0), gathered() ? input_.inverse_TK.size(1) : 1, experts_.num_rows, experts_.model);
    return codes;
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
    run_("combine", combine, in(rows_RD), indices(inverse_TK), nullptr, out(out_TD), out_TD.size(0),
         inverse_TK.size(1), experts_.model);
    return out_TD;
  }

  ExpertsConfig config_;
  bool is_float8_;
  OnDeviceOf run_;
  ExpertsInput input_;
  ExpertsWeights weights_;
  GroupedExperts experts_;
  at::Tensor rows_RD_;
  RowCodes d_gate_, d_up_;
};

std::int64_t num_rows(const ExpertsInput& input) {
  return input.token_R.defined() ? input.token_R.size(0) : input.x.size(0);
}

ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input) {
  return ExpertsCall(config, weights, input, num_rows(input)).forward(input);
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  ExpertsSaved saved, const at::Tensor& dy) {
  at::Tensor hidden_RF;
  ExpertsGradients d = ExpertsCall(config, weights, saved.input, num_rows(saved.input))
                           .backward(saved, dy, config.weights_later ? &hidden_RF : nullptr);
  if (!config.weights_later) return d;
  if (weights.lora.any()) {  // they are small, and made from what nothing else needs any more
    d.weights_later = [w = std::exchange(d.weights, {})] { return w; };
    return d;
  }
  d.weights_later = [config, saved, dy, hidden_RF, biases = std::exchange(d.weights, {}),
                     shapes = shapes_of(weights)] {
    ExpertsWeights w = ExpertsCall(config, shapes, saved.input, num_rows(saved.input))
                           .weight_half(saved.gate_RF, saved.up_RF, hidden_RF, dy);
    w.b1_eF = biases.b1_eF, w.b3_eF = biases.b3_eF, w.b2_eD = biases.b2_eD;
    return w;
  };
  return d;
}

bool takes_float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN, std::int64_t tile) {
  const std::int64_t K = w_KN.size(0), N = w_KN.size(1);
  return tile == kFloat8Tile && rows_MK.scalar_type() == at::kBFloat16 && K > 0 && K % 16 == 0 &&
         N > 0 && N % 8 == 0;
}

/// [M, K] times a weight of N columns.
at::Tensor product(const at::Tensor& rows_MK, const CodedWeight& w, std::int64_t N) {
  const std::int64_t M = rows_MK.size(0), K = rows_MK.size(1);
  const OnDeviceOf run(rows_MK);
  const at::Tensor x = aligned(rows_MK), y = at::empty({M, N}, x.options());
  const RowCodes codes = RowCodes::empty(M, K, x.options());
  run("expand8", expand8, in(x), nullptr, nullptr, Float8Rows(codes), M, 1, M, K);
  run("float8_product", cuda::float8_product,
      Float8Product{.num_rows = M,
                    .width = N,
                    .depth = K,
                    .num_experts = 1,
                    .ends_E = nullptr,
                    .a = {codes},
                    .b = {w},
                    .out = {out(y)}});
  return y;
}

at::Tensor float8_product(const at::Tensor& rows_MK, const at::Tensor& w_KN,
                          std::int64_t /*tile*/) {
  const bool is_transposed = !w_KN.t().is_contiguous();  // [K, N] in memory
  const at::Tensor w = is_transposed ? w_KN.contiguous() : w_KN.t();
  return product(rows_MK, CodedWeight(w, {}, is_transposed), w_KN.size(1));
}

at::Tensor float8_product_with(const at::Tensor& rows, const WeightCodes& w, bool transposed) {
  return product(rows, CodedWeight({}, w, transposed), w.codes.size(transposed ? 1 : 0));
}

/// The gate as its kernels have it, or nothing where these do not take it.
struct TermsOfGate {
  Gate gate;
  at::Tensor x_TD, terms;

  TermsOfGate(const at::Tensor& x, const at::Tensor& gate_ED)
      : gate{.num_tokens = x.size(0), .model = x.size(1), .num_experts = gate_ED.size(0)} {
    if (x.scalar_type() != at::kBFloat16 || gate_ED.scalar_type() != at::kFloat || gate.model < 8 ||
        gate.model % 8 != 0 || gate.num_experts < 1 || gate.num_experts > 256)
      return;
    x_TD = aligned(x);
    terms = at::empty({4, padded_experts(gate.num_experts), gate.model}, x.options());
    OnDeviceOf{x}("split_gate", split_gate, gate, read_floats(gate_ED), out(terms));
  }
  bool taken() const { return terms.defined(); }
};

at::Tensor gate_forward(const at::Tensor& x, const at::Tensor& gate_ED) {
  const TermsOfGate g(x, gate_ED);
  if (!g.taken()) return aten_kernels().gate_forward(x, gate_ED);
  const at::Tensor logits_TE = at::empty({x.size(0), gate_ED.size(0)}, gate_ED.options());
  OnDeviceOf{x}("gate_logits", gate_logits, g.gate, in(g.x_TD), in(g.terms), floats(logits_TE));
  return logits_TE;
}

GateGradients gate_backward(const at::Tensor& x, const at::Tensor& gate_ED,
                            const at::Tensor& d_logits_TE, bool as_product) {
  const TermsOfGate g(x, gate_ED);
  if (!g.taken()) return aten_kernels().gate_backward(x, gate_ED, d_logits_TE, as_product);
  GateGradients d{as_product ? at::Tensor() : at::empty_like(g.x_TD), at::empty_like(gate_ED)};
  const at::Tensor workspace = at::empty({gate_workspace(g.gate)}, x.options().dtype(at::kByte));
  OnDeviceOf{x}("gate_backward", cuda::gate_backward, g.gate, in(g.x_TD), in(g.terms),
                read_floats(d_logits_TE), out(workspace), floats(d.gate_ED), out(d.x_TD));
  if (as_product) {
    const std::int64_t num_terms = 3 * padded_experts(g.gate.num_experts);
    d.rows_TP = workspace.narrow(0, 0, x.size(0) * num_terms * 2)
                    .view(at::kBFloat16)
                    .view({x.size(0), num_terms});
    d.weight_PD = g.terms.flatten(0, 1).narrow(0, num_terms / 3, num_terms);
  }
  return d;
}

std::string refuses_experts(const ExpertsConfig& config, const ExpertsWeights& w) {
  const at::Tensor& w1 = w.w1_eFD;
  if (config.float8_tile > 0) {
    if (w.lora.any()) return "moesh's own experts take LoRA only without float8";
    if (config.float8_tile != kFloat8Tile || w1.size(1) % 16 != 0 || w1.size(2) % 16 != 0)
      return detail::concat("float8 has tiles of ", config.float8_tile, " in weights [experts, ",
                            w1.size(1), ", ", w1.size(2), "], and own kernels take tiles of ",
                            kFloat8Tile, " and multiples of 16");
    if (config.scores == ScoreSide::before && (w.b1_eF.defined() || w.b3_eF.defined()))
      return "own kernels take no biases after a score in float8";
  }
  if (w1.scalar_type() != at::kBFloat16)
    return detail::concat("the weights are ", c10::toString(w1.scalar_type()),
                          ", and own kernels take bfloat16");
  if (w1.size(1) < 1 || w1.size(1) % 8 != 0 || w1.size(2) % 8 != 0)
    return detail::concat("the weights are [experts, ", w1.size(1), ", ", w1.size(2),
                          "], and own kernels take multiples of 8");
  if (w1.size(0) < 1 || w1.size(0) > 512)
    return detail::concat("there are ", w1.size(0), " experts, and own kernels take 1 to 512");
  for (const at::Tensor& a : {w.lora.a13_erD, w.lora.a2_erF}) {
    const std::int64_t rank = a.defined() ? a.size(1) : 8;
    if (rank < 8 || rank % 8 != 0 || rank > cuda::kMaxRank)
      return detail::concat("the rank of LoRA is ", rank, ", and own kernels take 8, 16 .. ",
                            cuda::kMaxRank);
  }
  return "";
}

}  // namespace
}  // namespace hopper

const KernelTable& hopper_kernels() {
  static const KernelTable table = [] {
    KernelTable t = ampere_kernels();
    t.name = "hopper";
    hopper::add_delta_rule(t);
    t.gate_forward = hopper::gate_forward;
    t.gate_backward = hopper::gate_backward;
    t.pack_float8 = hopper::pack_float8;
    t.unpack_float8 = hopper::unpack_float8;
    t.float8_product = hopper::float8_product;
    t.takes_float8_product = hopper::takes_float8_product;
    t.write_weight_codes = hopper::write_weight_codes;
    t.float8_product_with = hopper::float8_product_with;
    t.experts_forward = hopper::experts_forward;
    t.experts_backward = hopper::experts_backward;
    t.refuses_device = on_device::refusal<cuda::check_hopper>;
    t.refuses_experts = hopper::refuses_experts;
    return t;
  }();
  return table;
}

}  // namespace moesh::kernels
