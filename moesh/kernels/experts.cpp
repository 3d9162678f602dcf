// Checks the arguments and takes the version for their device.
#include "moesh/kernels/experts.h"

#include <ATen/core/grad_mode.h>

#include "moesh/kernels/aten/aten.h"
#include "moesh/kernels/check.h"
#include "moesh/kernels/cpu/cpu.h"
#include "moesh/kernels/meta/meta.h"

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
  const auto plain = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  return {plain(w.w1_eFD), plain(w.w3_eFD), plain(w.w2_eDF),
          plain(w.b1_eF),  plain(w.b3_eF),  plain(w.b2_eD)};
}

ExpertsInput checked(const ExpertsConfig& config, const ExpertsWeights& w, const ExpertsInput& in) {
  const std::int64_t e = w.w1_eFD.size(0), D = w.w1_eFD.size(2);
  MOESH_CHECK(in.x.dim() == 2 && in.x.size(1) == D, ErrorKind::data, "x is ", describe(in.x),
              "; the experts take [rows, ", D, "]");
  check_tensor("counts_e", in.counts_e, at::kLong, 1);
  MOESH_CHECK(in.counts_e.is_cpu() && in.counts_e.size(0) == e, ErrorKind::data, "counts_e is ",
              describe(in.counts_e), "; it holds the rows of each of the ", e,
              " experts, on the host");
  MOESH_CHECK(in.token_R.defined() == in.inverse_TK.defined(), ErrorKind::data, "token_R is ",
              describe(in.token_R), " and inverse_TK ", describe(in.inverse_TK),
              "; pass both (rows are indices into tokens) or none (x holds the rows)");
  std::int64_t num_rows = in.x.size(0);
  if (in.token_R.defined()) {
    check_tensor("token_R", in.token_R, at::kLong, 1);
    check_tensor("inverse_TK", in.inverse_TK, at::kLong, 2);
    check_same_device("token_R", in.token_R, "x", in.x);
    check_same_device("inverse_TK", in.inverse_TK, "x", in.x);
    MOESH_CHECK(
        in.inverse_TK.size(0) == in.x.size(0) && in.inverse_TK.numel() >= in.token_R.numel(),
        ErrorKind::data, "inverse_TK is ", describe(in.inverse_TK), "; with ", in.x.size(0),
        " tokens and ", in.token_R.numel(), " rows it needs a line for each token",
        " and a place for each row");
    num_rows = in.token_R.size(0);
  }
  const at::Tensor counts = in.counts_e.contiguous();
  const auto* count = counts.const_data_ptr<std::int64_t>();
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < e; ++i) {
    MOESH_CHECK(count[i] >= 0, ErrorKind::data, "counts_e[", i, "] is ", count[i]);
    total += count[i];
  }
  MOESH_CHECK(total == num_rows, ErrorKind::data, "counts_e add up to ", total, ", but there are ",
              num_rows, " rows");
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
  const auto plain = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  return {in.x.contiguous(), counts, plain(in.scores_R), plain(in.token_R), plain(in.inverse_TK)};
}

void check_x(const at::Tensor& x) {
  MOESH_CHECK(x.defined() && is_kernel_dtype(x.scalar_type()), ErrorKind::data, "x is ",
              describe(x), "; the experts take float64, float32 or bfloat16");
}

}  // namespace

ExpertsOutput experts_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                              const ExpertsInput& input) {
  const at::NoGradGuard no_grad;
  check_x(input.x);
  const auto w = checked(weights, input.x);
  const auto in = checked(config, w, input);
  if (input.x.is_meta()) return meta::experts_forward(config, w, in);
  return input.x.is_cpu() ? cpu::experts_forward(config, w, in)
                          : aten::experts_forward(config, w, in);
}

ExpertsGradients experts_backward(const ExpertsConfig& config, const ExpertsWeights& weights,
                                  const ExpertsSaved& saved, const at::Tensor& dy) {
  const at::NoGradGuard no_grad;
  const at::Tensor& x = saved.input.x;
  check_x(x);
  const auto w = checked(weights, x);
  const auto in = checked(config, w, saved.input);
  const std::int64_t num_rows = in.token_R.defined() ? in.token_R.size(0) : x.size(0);
  MOESH_CHECK(dy.defined() && dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type() &&
                  dy.device() == x.device(),
              ErrorKind::data, "dy is ", describe(dy), "; y was ", describe(x));
  check_weight("gate_RF", saved.gate_RF, x, {num_rows, w.w1_eFD.size(1)});
  check_weight("up_RF", saved.up_RF, x, {num_rows, w.w1_eFD.size(1)});
  const ExpertsSaved kept{in, saved.gate_RF.contiguous(), saved.up_RF.contiguous()};
  if (x.is_meta()) return meta::experts_backward(config, w, kept, dy.contiguous());
  return x.is_cpu() ? cpu::experts_backward(config, w, kept, dy.contiguous())
                    : aten::experts_backward(config, w, kept, dy.contiguous());
}

}  // namespace moesh::kernels
