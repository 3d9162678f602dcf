#include "moesh/kernels/experts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace {

void check_weight(const char* name, const at::Tensor& w, const at::Tensor& x,
                  at::IntArrayRef sizes) {
  MOESH_CHECK(w.defined() && w.sizes() == sizes && w.scalar_type() == x.scalar_type() &&
                  w.device() == x.device(),
              ErrorKind::data, name, " is ", describe(w), "; with x ", describe(x), " it must be ",
              c10::toString(x.scalar_type()), " ", sizes, " on ", x.device());
}

ExpertsWeights checked(const ExpertsWeights& w, const at::Tensor& x) {
  MOESH_CHECK(w.w1_eFD.defined() && w.w1_eFD.dim() == 3, ErrorKind::data, "w1_eFD is ",
              describe(w.w1_eFD), "; pass [experts, ffn, model]");
  const std::int64_t e = w.w1_eFD.size(0), F = w.w1_eFD.size(1), D = w.w1_eFD.size(2);
  MOESH_CHECK(D >= 1, ErrorKind::data, "w1_eFD is ", describe(w.w1_eFD),
              "; the model width must be 1 or more");
  check_weight("w1_eFD", w.w1_eFD, x, {e, F, D});
  check_weight("w3_eFD", w.w3_eFD, x, {e, F, D});
  check_weight("w2_eDF", w.w2_eDF, x, {e, D, F});
  if (w.b1_eF.defined()) check_weight("b1_eF", w.b1_eF, x, {e, F});
  if (w.b3_eF.defined()) check_weight("b3_eF", w.b3_eF, x, {e, F});
  if (w.b2_eD.defined()) check_weight("b2_eD", w.b2_eD, x, {e, D});
  const ExpertsLora& l = w.lora;
  if (l.a13_erD.defined()) {
    const std::int64_t r = l.a13_erD.size(1);
    check_weight("a13_erD", l.a13_erD, x, {e, r, D});
    check_weight("b13_e2Fr", l.b13_e2Fr, x, {e, 2, F, r});
  }
  if (l.a2_erF.defined()) {
    const std::int64_t r = l.a2_erF.size(1);
    check_weight("a2_erF", l.a2_erF, x, {e, r, F});
    check_weight("b2_eDr", l.b2_eDr, x, {e, D, r});
  }
  // Where there are codes, the weights are not there.
  return mapped(w, [&](const at::Tensor& t) {
    return w.codes.defined() && t.defined() && t.dim() == 3 ? t : plain(t);
  });
}

ExpertsInput checked(const ExpertsConfig& config, const ExpertsWeights& w, const ExpertsInput& in) {
  const std::int64_t e = w.w1_eFD.size(0), D = w.w1_eFD.size(2);
  MOESH_CHECK(in.x.dim() == 2 && in.x.size(1) == D, ErrorKind::data, "x is ", describe(in.x),
              "; the experts take [rows, ", D, "]");
  check_tensor("ends_e", in.ends_e, at::kInt, 1);
  if (!in.x.is_meta()) check_same_device("ends_e", in.ends_e, "x", in.x);
  MOESH_CHECK(in.ends_e.size(0) == e, ErrorKind::data, "ends_e is ", describe(in.ends_e),
              "; it holds where the rows of each of the ", e, " experts end");
  MOESH_CHECK(in.token_R.defined() == in.inverse_TK.defined(), ErrorKind::data, "token_R is ",
              describe(in.token_R), " and inverse_TK ", describe(in.inverse_TK),
              "; pass both (rows are indices into tokens) or none (x holds the rows)");
  std::int64_t num_rows = in.x.size(0);
  if (in.token_R.defined()) {
    check_tensor("token_R", in.token_R, at::kInt, 1);
    check_tensor("inverse_TK", in.inverse_TK, at::kInt, 2);
    check_same_device("token_R", in.token_R, "x", in.x);
    check_same_device("inverse_TK", in.inverse_TK, "x", in.x);
    MOESH_CHECK(
        in.inverse_TK.size(0) == in.x.size(0) && in.inverse_TK.numel() >= in.token_R.numel(),
        ErrorKind::data, "inverse_TK is ", describe(in.inverse_TK), "; with ", in.x.size(0),
        " tokens and ", in.token_R.numel(), " rows it needs a line for each token",
        " and a place for each row");
    num_rows = in.token_R.size(0);
  }
  const auto score_dtype = in.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  MOESH_CHECK(in.scores_R.defined() == (config.scores != ScoreSide::none), ErrorKind::data,
              "scores_R is ", describe(in.scores_R),
              "; pass scores exactly if they act before or after the experts");
  if (in.scores_R.defined()) {
    check_tensor("scores_R", in.scores_R, score_dtype, 1);
    check_same_device("scores_R", in.scores_R, "x", in.x);
    MOESH_CHECK(in.scores_R.size(0) == num_rows, ErrorKind::data, "scores_R is ",
                describe(in.scores_R), "; there are ", num_rows, " rows");
  }
  return {in.x.contiguous(), in.ends_e.contiguous(), plain(in.scores_R), plain(in.token_R),
          plain(in.inverse_TK)};
}

std::uint32_t version(const at::Tensor& t) {
  // Tensors of an inference mode have none, and no backward.
  return t.is_inference() ? 0 : t.unsafeGetTensorImpl()->version_counter().current_version();
}

void check_x(const at::Tensor& x) {
  MOESH_CHECK(x.defined() && is_kernel_dtype(x.scalar_type()), ErrorKind::data, "x is ",
              describe(x), "; the experts take float64, float32 or bfloat16");
}

}  // namespace

ExpertsWeights shapes_of(const ExpertsWeights& w) {
  ExpertsWeights shapes = mapped(w, [](const at::Tensor& t) {
    return t.defined() ? at::empty({1}, t.options()).expand(t.sizes()) : t;
  });
  shapes.lora = {}, shapes.codes = {};
  return shapes;
}

ExpertsWeights empty_products(const ExpertsWeights& w) {
  return {fresh(w.w1_eFD), fresh(w.w3_eFD), fresh(w.w2_eDF), {}, {}, fresh(w.b2_eD)};
}

std::string plain_experts_only(const ExpertsConfig& config, const ExpertsWeights& weights) {
  return weights.lora.any() || config.float8_tile > 0 ? "experts have LoRA or float8" : "";
}

void count_float8_experts(const ExpertsConfig& config, const ExpertsInput& input,
                          const at::Tensor& hidden_RF, const at::Tensor& dy,
                          const at::Tensor& d_gate_RF, const at::Tensor& d_up_RF) {
  const Float8Counts& to = config.float8_counts;
  if (!to.defined()) return;
  const std::int64_t tile = config.float8_tile;
  if (to.has_inputs) count_float8_rows(to.activations(), input.x, tile, input.token_R);
  count_float8_rows(to.activations(), hidden_RF, tile);
  if (to.has_gradients) count_float8_rows(to.gradients(), dy, tile, input.token_R);
  count_float8_rows(to.gradients(), d_gate_RF, tile);
  count_float8_rows(to.gradients(), d_up_RF, tile);
}

ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input) {
  const at::NoGradGuard no_grad;
  check_x(input.x);
  const auto w = checked(weights, input.x);
  ExpertsOutput out = kernels_for(config, w).experts_forward(config, w, checked(config, w, input));
  out.saved.version = version(out.saved.gate_RF);
  return out;
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  ExpertsSaved saved, const at::Tensor& dy) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = saved.input.x;
  check_x(x);
  const auto w = checked(weights, x);
  saved.input = checked(config, w, saved.input);
  const at::Tensor& token_R = saved.input.token_R;
  const std::int64_t num_rows = token_R.defined() ? token_R.size(0) : x.size(0);
  MOESH_CHECK(dy.defined() && dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type() &&
                  dy.device() == x.device(),
              ErrorKind::data, "dy is ", describe(dy), "; y was ", describe(x));
  check_weight("gate_RF", saved.gate_RF, x, {num_rows, w.w1_eFD.size(1)});
  check_weight("up_RF", saved.up_RF, x, {num_rows, w.w1_eFD.size(1)});
  const ExpertsLora& l = w.lora;
  if (l.any()) {
    const auto check_low = [&](const char* name, const at::Tensor& low_Rr, const at::Tensor& a) {
      if (a.defined()) check_weight(name, low_Rr, x, {num_rows, a.size(1)});
    };
    check_low("low13_Rr", saved.low13_Rr, l.a13_erD), check_low("low2_Rr", saved.low2_Rr, l.a2_erF);
  }
  MOESH_CHECK(version(saved.gate_RF) == saved.version, ErrorKind::internal,
              "a second backward of the experts: the first one consumed what forward had saved");
  for (at::Tensor* t : {&saved.gate_RF, &saved.up_RF}) {
    t->unsafeGetTensorImpl()->bump_version();  // also where this kernel does not write over it
    *t = t->contiguous();
  }
  return kernels_for(config, w).experts_backward(config, w, std::move(saved), dy.contiguous());
}

}  // namespace moesh::kernels
