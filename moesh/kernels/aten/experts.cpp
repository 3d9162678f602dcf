// Grouped SwiGLU with LibTorch ops: one grouped GEMM for all experts where the library has one
// (bfloat16), which reads the ends on the device; else one GEMM each, which waits for them.
// T tokens, D model, F ffn, e local experts, K top-k, R rows at their experts

#include "moesh/kernels/experts.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/float8.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

/// The rows of each expert, and GEMMs over them.
class RowsByExpert {
 public:
  RowsByExpert(const ExpertsWeights& w, const ExpertsInput& in)
      : ends_e_(in.ends_e), num_rows_(in.token_R.defined() ? in.token_R.size(0) : in.x.size(0)) {
    const at::Tensor& w1 = w.w1_eFD;
    const auto rank_of = [](const at::Tensor& a_erX) {
      return a_erX.defined() ? a_erX.size(1) : 0;
    };
    // The grouped GEMM wants rows of a multiple of 16 bytes.
    grouped_ = w1.scalar_type() == at::kBFloat16 && w1.size(1) > 0 && w1.size(1) % 8 == 0 &&
               w1.size(2) % 8 == 0 && rank_of(w.lora.a13_erD) % 8 == 0 &&
               rank_of(w.lora.a2_erF) % 8 == 0;
    // One GEMM for each expert takes its number of rows from the host: a wait for the device.
    if (!grouped_) first_ = first_rows(ends_e_.cpu(), num_rows_);
  }

  /// [R, A] times each expert's [A, B].
  at::Tensor rows_times(const at::Tensor& rows_RA, const at::Tensor& w_eAB) const {
    if (num_rows_ == 0) return at::empty({0, w_eAB.size(2)}, rows_RA.options());
    if (grouped_) return at::_grouped_mm(rows_RA, w_eAB, ends_e_);
    at::Tensor out = at::empty({num_rows_, w_eAB.size(2)}, rows_RA.options());
    for (std::int64_t e = 0; e < num_experts(); ++e) {
      if (rows_of(e) == 0) continue;
      at::Tensor part = narrow(out, e);
      at::mm_out(part, narrow(rows_RA, e), w_eAB[e]);
    }
    return out;
  }

  /// For each expert a' b over its rows: zeros for experts without rows (the grouped GEMM writes
  /// them as well).
  at::Tensor outer(const at::Tensor& a_RA, const at::Tensor& b_RB) const {
    if (num_rows_ == 0)
      return at::zeros({num_experts(), a_RA.size(1), b_RB.size(1)}, a_RA.options());
    if (grouped_) return at::_grouped_mm(a_RA.t(), b_RB, ends_e_);
    at::Tensor out = at::empty({num_experts(), a_RA.size(1), b_RB.size(1)}, a_RA.options());
    for (std::int64_t e = 0; e < num_experts(); ++e) {
      at::Tensor part = out[e];
      if (rows_of(e) == 0)
        part.zero_();
      else
        at::mm_out(part, narrow(a_RA, e).t(), narrow(b_RB, e));
    }
    return out;
  }

  /// The sum over each expert's rows.
  at::Tensor sums(const at::Tensor& rows_RA) const {
    if (rows_RA.numel() == 0) return at::zeros({num_experts(), rows_RA.size(1)}, rows_RA.options());
    return at::segment_reduce(rows_RA, "sum", {}, {}, at::constant_pad_nd(ends_e_, {1, 0}, 0),
                              /*axis=*/0, /*unsafe=*/true);
  }

  /// Each row's line of a bias, in `dtype`.
  at::Tensor per_row(const at::Tensor& bias_eA, at::ScalarType dtype) const {
    const at::Tensor rows_R = at::arange(num_rows_, bias_eA.options().dtype(at::kInt));
    const at::Tensor expert_R =
        at::searchsorted(ends_e_, rows_R, /*out_int32=*/true, /*right=*/true);
    return bias_eA.to(dtype).index_select(0, expert_R);
  }

 private:
  std::int64_t num_experts() const { return ends_e_.size(0); }
  std::int64_t rows_of(std::int64_t e) const { return first_[e + 1] - first_[e]; }
  at::Tensor narrow(const at::Tensor& rows, std::int64_t e) const {
    return rows.narrow(0, first_[e], rows_of(e));
  }

  at::Tensor ends_e_;
  std::int64_t num_rows_;
  bool grouped_;
  std::vector<std::int64_t> first_;  // only where GEMMs are not grouped
};

/// The pre-activations as the activation sees them.
at::Tensor with_score_and_bias(const at::Tensor& g_RF, const ExpertsConfig& config,
                               const at::Tensor& scores_R, const at::Tensor& bias_eF,
                               const RowsByExpert& groups) {
  at::Tensor out = g_RF.to(wide(g_RF));
  if (config.scores == ScoreSide::before) out = out * scores_R.unsqueeze(1);
  if (bias_eF.defined()) out = out + groups.per_row(bias_eF, out.scalar_type());
  return out;
}

struct HiddenTensors {
  at::Tensor h, dh_dg, dh_du;  // the derivatives only if wanted
};

HiddenTensors hidden(Activation activation, at::Tensor g, at::Tensor u, bool derivatives) {
  HiddenTensors out;
  if (activation == Activation::swiglu) {
    const at::Tensor s = at::sigmoid(g), silu = g * s;
    out.h = silu * u;
    if (derivatives) out.dh_dg = (s + silu * (1 - s)).mul_(u), out.dh_du = silu;
  } else {
    constexpr double limit = 7, alpha = 1.702;
    const at::Tensor gc = g.clamp_max(limit), uc = u.clamp(-limit, limit) + 1;
    const at::Tensor s = at::sigmoid(alpha * gc), swish = gc * s;
    out.h = swish * uc;
    if (derivatives) {
      out.dh_dg = (s + alpha * swish * (1 - s)).mul_(uc).masked_fill_(g > limit, 0);
      out.dh_du = swish.masked_fill(u.abs() > limit, 0);
    }
  }
  return out;
}

at::Tensor gathered(const ExpertsInput& in, const at::Tensor& x) {
  return in.token_R.defined() ? x.index_select(0, in.token_R) : x;
}
at::Tensor combined(const ExpertsInput& in, const at::Tensor& rows) {
  return in.token_R.defined() ? aten_kernels().combine_rows(rows, in.inverse_TK) : rows;
}

// Gate rows, then up rows: what one product with b13 gives.
at::Tensor joined(const at::Tensor& b13_e2Fr) { return b13_e2Fr.flatten(1, 2); }

// scale (a x) of each row.
at::Tensor low_rank(const RowsByExpert& groups, const at::Tensor& rows_RX, const at::Tensor& a_erX,
                    double scale) {
  return groups.rows_times(rows_RX, a_erX.transpose(1, 2)).mul_(scale);
}

}  // namespace

ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input) {
  const RowsByExpert groups(weights, input);
  const ExpertsLora& lora = weights.lora;
  const std::int64_t tile = config.float8_tile;
  ExpertsOutput out{{}, {input, {}, {}}};
  {
    const at::Tensor rows_RD = gathered(input, float8_rows(input.x, tile));
    out.saved.gate_RF =
        groups.rows_times(rows_RD, float8_weight(weights.w1_eFD, tile).transpose(1, 2));
    out.saved.up_RF =
        groups.rows_times(rows_RD, float8_weight(weights.w3_eFD, tile).transpose(1, 2));
    if (lora.a13_erD.defined()) {
      out.saved.low13_Rr = low_rank(groups, tile > 0 ? gathered(input, input.x) : rows_RD,
                                    lora.a13_erD, lora.scale13);
      const auto added =
          groups.rows_times(out.saved.low13_Rr, joined(lora.b13_e2Fr).transpose(1, 2)).chunk(2, 1);
      out.saved.gate_RF.add_(added[0]), out.saved.up_RF.add_(added[1]);
    }
  }
  at::Tensor h =
      hidden(config.activation,
             with_score_and_bias(out.saved.gate_RF, config, input.scores_R, weights.b1_eF, groups),
             with_score_and_bias(out.saved.up_RF, config, input.scores_R, weights.b3_eF, groups),
             false)
          .h;
  if (config.scores == ScoreSide::after) h.mul_(input.scores_R.unsqueeze(1));
  h = h.to(input.x.scalar_type());
  at::Tensor y_RD =
      groups.rows_times(float8_rows(h, tile), float8_weight(weights.w2_eDF, tile).transpose(1, 2));
  if (lora.a2_erF.defined()) {
    out.saved.low2_Rr = low_rank(groups, h, lora.a2_erF, lora.scale2);
    y_RD.add_(groups.rows_times(out.saved.low2_Rr, lora.b2_eDr.transpose(1, 2)));
  }
  if (weights.b2_eD.defined()) {
    at::Tensor bias_RD = groups.per_row(weights.b2_eD, wide(y_RD));
    if (config.scores == ScoreSide::after) bias_RD.mul_(input.scores_R.unsqueeze(1));
    y_RD = bias_RD.add_(y_RD).to(y_RD.scalar_type());
  }
  out.y = combined(input, y_RD);
  return out;
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  ExpertsSaved saved, const at::Tensor& dy) {
  const ExpertsInput& in = saved.input;
  const RowsByExpert groups(weights, in);
  const ExpertsLora& lora = weights.lora;
  const std::int64_t tile = config.float8_tile;
  const auto dtype = in.x.scalar_type();
  const bool before = config.scores == ScoreSide::before, after = config.scores == ScoreSide::after;
  const at::Tensor scores_R1 = in.scores_R.defined() ? in.scores_R.unsqueeze(1) : at::Tensor();
  ExpertsGradients out;

  const at::Tensor dy_RD = gathered(in, dy);
  at::Tensor dh = groups
                      .rows_times(tile > 0 ? gathered(in, float8_rows(dy, tile)) : dy_RD,
                                  float8_weight(weights.w2_eDF, tile))
                      .to(wide(dy));
  at::Tensor d_low2_Rr, d_low13_Rr;  // of what a2 and a13 give, before their scale
  if (lora.a2_erF.defined()) {
    d_low2_Rr = groups.rows_times(dy_RD, lora.b2_eDr).mul_(lora.scale2);
    dh.add_(groups.rows_times(d_low2_Rr, lora.a2_erF));
  }
  HiddenTensors v =
      hidden(config.activation,
             with_score_and_bias(saved.gate_RF, config, in.scores_R, weights.b1_eF, groups),
             with_score_and_bias(saved.up_RF, config, in.scores_R, weights.b3_eF, groups), true);
  if (after) {
    out.scores_R = (dh * v.h).sum(1);
    if (weights.b2_eD.defined())
      out.scores_R.add_((dy_RD.to(wide(dy)) * groups.per_row(weights.b2_eD, wide(dy))).sum(1));
    dh.mul_(scores_R1), v.h.mul_(scores_R1);
  }
  ExpertsWeights d_biases;
  if (weights.b2_eD.defined()) {
    const at::Tensor wide_dy = dy_RD.to(wide(dy));
    d_biases.b2_eD = groups.sums(after ? wide_dy * scores_R1 : wide_dy).to(dtype);
  }
  at::Tensor dg = v.dh_dg.mul_(dh), du = v.dh_du.mul_(dh);
  if (weights.b1_eF.defined()) d_biases.b1_eF = groups.sums(dg).to(dtype);
  if (weights.b3_eF.defined()) d_biases.b3_eF = groups.sums(du).to(dtype);
  if (before) {
    out.scores_R = (dg * saved.gate_RF).sum(1).add_((du * saved.up_RF).sum(1));
    dg.mul_(scores_R1), du.mul_(scores_R1);
  }
  dg = dg.to(dtype), du = du.to(dtype);
  out.x = groups.rows_times(float8_rows(dg, tile), float8_weight(weights.w1_eFD, tile))
              .add_(groups.rows_times(float8_rows(du, tile), float8_weight(weights.w3_eFD, tile)));
  if (lora.a13_erD.defined()) {
    d_low13_Rr = groups.rows_times(at::cat({dg, du}, 1), joined(lora.b13_e2Fr)).mul_(lora.scale13);
    out.x.add_(groups.rows_times(d_low13_Rr, lora.a13_erD));
  }
  out.x = combined(in, out.x);
  const at::Tensor h = v.h.to(dtype);
  count_float8_experts(config, in, h, dy, dg, du);
  const auto weight_half = [=, low13_Rr = saved.low13_Rr,
                            low2_Rr = saved.low2_Rr](const at::Tensor& d_rows_RD) {
    const at::Tensor rows_RD = gathered(in, in.x);
    if (low2_Rr.defined() || low13_Rr.defined()) {
      ExpertsWeights d;
      if (low2_Rr.defined()) {
        d.lora.a2_erF = groups.outer(d_low2_Rr, h);
        d.lora.b2_eDr = groups.outer(d_rows_RD, low2_Rr);
      }
      if (low13_Rr.defined()) {
        d.lora.a13_erD = groups.outer(d_low13_Rr, rows_RD);
        d.lora.b13_e2Fr =
            groups.outer(at::cat({dg, du}, 1), low13_Rr).unflatten(1, {2, dg.size(1)});
      }
      return d;
    }
    ExpertsWeights d = d_biases;
    d.w2_eDF = groups.outer(d_rows_RD, h);
    d.w1_eFD = groups.outer(dg, rows_RD);
    d.w3_eFD = groups.outer(du, rows_RD);
    return d;
  };
  // There are several times more rows at their experts than tokens: they are gathered once more.
  if (config.weights_later)
    out.weights_later = [weight_half, in, dy] { return weight_half(gathered(in, dy)); };
  else
    out.weights = weight_half(dy_RD);
  return out;
}

void add_experts(KernelTable& t) {
  t.experts_forward = experts_forward;
  t.experts_backward = experts_backward;
}

}  // namespace moesh::kernels::aten
