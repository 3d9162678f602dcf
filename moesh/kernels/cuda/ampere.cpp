// The torch side of kernels that every GPU of compute capability 8.0 or later runs: allocates, and
// calls launch.h and update.h. Nothing here waits for the device, but for a sort of a part of the
// experts, whose number of rows is not known before. What they do not take goes to LibTorch's ops.
// T tokens, D model, E experts, K top-k, R rows at their experts

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/on_device.h"
#include "moesh/kernels/cuda/update.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels {
namespace ampere {

void add_rowwise(KernelTable&);  // in ampere_rowwise.cpp

namespace {

bool takes(const at::Tensor& t) { return t.scalar_type() == at::kFloat && in_chunks(t); }

bool is_narrow(const at::Tensor& t) { return t.scalar_type() == at::kBFloat16; }

bool takes(const AdamWParam& p) {
  return takes(p.value) && takes(p.mean) && takes(p.mean_square) && in_chunks(p.copy);
}

TopK top_k(const at::Tensor& scores_TE, std::int64_t k) {
  const std::int64_t num_tokens = scores_TE.size(0), num_experts = scores_TE.size(1);
  if (scores_TE.scalar_type() != at::kFloat || num_experts > 256 || k < 1)
    return aten_kernels().top_k(scores_TE, k);
  const OnDeviceOf run(scores_TE);
  const auto options = scores_TE.options();
  TopK out{at::empty({num_tokens, k}, options),
           at::empty({num_tokens, k}, options.dtype(at::kLong))};
  // The token of a NaN is not reported, because the host would have to wait for it: a NaN is chosen
  // first, and ends the step as its loss.
  run("top_k", cuda::top_k, read_floats(scores_TE), num_tokens, num_experts, k,
      floats(out.values_TK), out.experts_TK.mutable_data_ptr<std::int64_t>());
  return out;
}

Sorted sort_by_expert(const at::Tensor& experts_TK, std::int64_t num_experts, ExpertRange range) {
  if (range.count < 1 || range.count > 512)
    return aten_kernels().sort_by_expert(experts_TK, num_experts, range);
  const OnDeviceOf run(experts_TK);
  const auto options = experts_TK.options().dtype(at::kInt);
  const std::int64_t num_choices = experts_TK.numel();
  Sorted out{.order_R = at::empty({num_choices}, options),
             .token_R = at::empty({num_choices}, options),
             .inverse_TK = at::empty(experts_TK.sizes(), options),
             .ends_e = at::empty({range.count}, options)};
  Sort sort{.experts_TK = read_longs(experts_TK),
            .all_experts = num_experts,
            .weight_TK = nullptr,
            .num_tokens = experts_TK.size(0),
            .top_k = experts_TK.size(1),
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

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index_R) {
  if (x.dim() != 1 || x.scalar_type() != at::kFloat) return aten_kernels().gather_rows(x, index_R);
  const at::Tensor out_R = at::empty({index_R.numel()}, x.options());
  OnDeviceOf{x}("gather_floats", gather_floats, read_floats(x), indices(index_R), floats(out_R),
                index_R.numel());
  return out_R;
}

bool takes_router(const at::Tensor& logits_TE, const at::Tensor& experts_TK) {
  return logits_TE.scalar_type() == at::kFloat && logits_TE.size(1) >= 1 &&
         logits_TE.size(1) <= 256 && experts_TK.size(1) >= 1 && experts_TK.size(1) <= 32;
}

const bool* flags(const at::Tensor& t) {
  return has_memory(t) ? t.const_data_ptr<bool>() : nullptr;
}

cuda::Weighing weighing_of(const kernels::Weighing& w, const at::Tensor& logits_TE,
                           const at::Tensor& experts_TK) {
  using Of = cuda::Weighing;
  return {.num_tokens = logits_TE.size(0),
          .num_experts = logits_TE.size(1),
          .top_k = experts_TK.size(1),
          .scoring = w.scoring == Scoring::sigmoid   ? Of::sigmoid
                     : w.scoring == Scoring::softmax ? Of::softmax
                                                     : Of::softmax_chosen,
          .normalize = w.normalize,
          .epsilon = static_cast<float>(w.epsilon),
          .scale = static_cast<float>(w.scale)};
}

at::Tensor weigh_forward(const kernels::Weighing& w, const at::Tensor& logits_TE,
                         const at::Tensor& experts_TK) {
  if (!takes_router(logits_TE, experts_TK))
    return aten_kernels().weigh_forward(w, logits_TE, experts_TK);
  const at::Tensor weights_TK = at::empty(experts_TK.sizes(), logits_TE.options());
  OnDeviceOf{logits_TE}("weigh", weigh, weighing_of(w, logits_TE, experts_TK),
                        read_floats(logits_TE), read_longs(experts_TK), floats(weights_TK));
  return weights_TK;
}

at::Tensor weigh_backward(const kernels::Weighing& w, const at::Tensor& logits_TE,
                          const at::Tensor& experts_TK, const at::Tensor& d_weights_TK) {
  if (!takes_router(logits_TE, experts_TK))
    return aten_kernels().weigh_backward(w, logits_TE, experts_TK, d_weights_TK);
  const at::Tensor d_logits_TE = at::empty_like(logits_TE);
  OnDeviceOf{logits_TE}("weigh_backward", cuda::weigh_backward,
                        weighing_of(w, logits_TE, experts_TK), read_floats(logits_TE),
                        read_longs(experts_TK), read_floats(d_weights_TK), floats(d_logits_TE));
  return d_logits_TE;
}

at::Tensor count_choices(const at::Tensor& experts_TK, const at::Tensor& valid_T1,
                         std::int64_t num_experts) {
  if (num_experts < 1 || num_experts > 8192)
    return aten_kernels().count_choices(experts_TK, valid_T1, num_experts);
  const at::Tensor counts_E = at::zeros({num_experts}, experts_TK.options());
  OnDeviceOf{counts_E}("count_choices", cuda::count_choices, read_longs(experts_TK),
                       flags(valid_T1), experts_TK.size(0), experts_TK.size(1), num_experts,
                       counts_E.mutable_data_ptr<std::int64_t>());
  return counts_E;
}

bool takes_balance(const BalanceOf& b, const at::Tensor& logits_TE) {
  return b.equal_runs && logits_TE.size(0) > 0 && takes_router(logits_TE, b.experts_TK);
}

Balance balance_of(const BalanceOf& b, const at::Tensor& logits_TE) {
  return {.num_tokens = logits_TE.size(0),
          .num_experts = logits_TE.size(1),
          .top_k = b.experts_TK.size(1),
          .num_sequences = b.members_BT.size(0),
          .softmax = b.softmax,
          .experts_TK = read_longs(b.experts_TK),
          .valid_T = flags(b.valid_T1)};
}

at::Tensor balance_sums(const BalanceOf& b, const at::Tensor& logits_TE) {
  if (!takes_balance(b, logits_TE)) return aten_kernels().balance_sums(b, logits_TE);
  const Balance balance = balance_of(b, logits_TE);
  const at::Tensor workspace = at::empty({balance_workspace(balance)}, logits_TE.options()),
                   sums_2BE = at::empty({2, balance.num_sequences, balance.num_experts},
                                        logits_TE.options());
  OnDeviceOf{logits_TE}("balance", cuda::balance, balance, read_floats(logits_TE),
                        floats(workspace), floats(sums_2BE));
  return sums_2BE;
}

at::Tensor balance_sums_backward(const BalanceOf& b, const at::Tensor& logits_TE,
                                 const at::Tensor& d_sums_BE) {
  if (!takes_balance(b, logits_TE))
    return aten_kernels().balance_sums_backward(b, logits_TE, d_sums_BE);
  const at::Tensor d_logits_TE = at::empty_like(logits_TE);
  OnDeviceOf{logits_TE}("balance_backward", balance_backward, balance_of(b, logits_TE),
                        read_floats(logits_TE), read_floats(d_sums_BE), floats(d_logits_TE));
  return d_logits_TE;
}

at::Tensor combine_rows(const at::Tensor& rows_RD, const at::Tensor& inverse_TK) {
  if (rows_RD.dim() != 2 || rows_RD.scalar_type() != at::kBFloat16 || rows_RD.size(1) % 8 != 0 ||
      !in_chunks(rows_RD))
    return aten_kernels().combine_rows(rows_RD, inverse_TK);
  const OnDeviceOf run(rows_RD);
  const std::int64_t num_tokens = inverse_TK.size(0);
  const at::Tensor y_TD = at::empty({num_tokens, rows_RD.size(1)}, rows_RD.options());
  run("combine", combine, in(rows_RD), indices(inverse_TK), nullptr, out(y_TD), num_tokens,
      inverse_TK.size(1), rows_RD.size(1));
  return y_TD;
}

void adamw_(const AdamWNumbers& numbers, const std::vector<AdamWParam>& params) {
  std::vector<AdamWTensor> tensors;
  std::vector<at::Tensor> gradients;  // that live until the kernel has its place in the queue
  std::vector<AdamWParam> rest;
  for (const auto& p : params) {
    if (p.value.numel() == 0) continue;
    if (!takes(p)) {
      rest.push_back(p);
      continue;
    }
    gradients.push_back(aligned(p.gradient));
    tensors.push_back({.value = floats(p.value),
                       .gradient = in(gradients.back()),
                       .mean = floats(p.mean),
                       .mean_square = floats(p.mean_square),
                       .copy = out(p.copy),
                       .size = p.value.numel(),
                       .weight_decay = p.weight_decay,
                       .is_narrow = is_narrow(p.gradient)});
  }
  if (!rest.empty()) aten_kernels().adamw_(numbers, rest);
  const AdamWStep step{.beta1 = numbers.beta1,
                       .beta2 = numbers.beta2,
                       .eps = numbers.eps,
                       .numbers = static_cast<const double*>(in(numbers.step))};
  OnDeviceOf{numbers.step}("adamw", adamw, step, tensors.data(),
                           static_cast<std::int64_t>(tensors.size()));
}

void cast_all(const std::vector<Cast>& casts) {
  std::vector<Cast> rest;
  std::vector<NarrowTensor> narrow;
  for (const auto& [to, from] : casts) {
    const auto are = [&](at::ScalarType a, at::ScalarType b) {
      return in_chunks(from) && in_chunks(to) && from.scalar_type() == a && to.scalar_type() == b;
    };
    if (to.numel() == 0) continue;
    if (are(at::kBFloat16, at::kFloat))
      OnDeviceOf{to}("widen", widen, in(from), floats(to), to.numel());
    else if (are(at::kFloat, at::kBFloat16))
      narrow.push_back({read_floats(from), out(to), to.numel()});
    else
      rest.push_back({to, from});
  }
  if (!narrow.empty())
    OnDeviceOf{casts[0].to}("narrow", cuda::narrow, narrow.data(),
                            static_cast<std::int64_t>(narrow.size()));
  if (!rest.empty()) aten_kernels().cast_all(rest);
}

at::Tensor sum_of_squares(const std::vector<at::Tensor>& tensors) {
  if (!std::all_of(tensors.begin(), tensors.end(),
                   [](const at::Tensor& t) { return t.scalar_type() != at::kDouble; }))
    return aten_kernels().sum_of_squares(tensors);
  std::vector<at::Tensor> held;
  std::vector<SquaresTensor> list;
  for (const auto& t : tensors) {
    held.push_back(aligned(t));
    list.push_back({in(held.back()), t.numel(), is_narrow(t)});
  }
  const auto num_tensors = static_cast<std::int64_t>(list.size());
  const auto wide = tensors[0].options().dtype(at::kDouble);
  const at::Tensor workspace = at::empty({squares_workspace(num_tensors)}, wide),
                   sum = at::empty({}, wide);
  OnDeviceOf{sum}("sum_of_squares", cuda::sum_of_squares, list.data(), num_tensors,
                  static_cast<double*>(out(workspace)), static_cast<double*>(out(sum)));
  return sum;
}

std::string refuses_experts(const ExpertsConfig&, const ExpertsWeights&) {
  return "own kernels for experts need compute capability 9.0";
}

}  // namespace
}  // namespace ampere

const KernelTable& ampere_kernels() {
  static const KernelTable table = [] {
    KernelTable t = aten_kernels();
    t.name = "ampere";
    ampere::add_rowwise(t);
    t.top_k = ampere::top_k;
    t.sort_by_expert = ampere::sort_by_expert;
    t.gather_rows = ampere::gather_rows;
    t.weigh_forward = ampere::weigh_forward;
    t.weigh_backward = ampere::weigh_backward;
    t.count_choices = ampere::count_choices;
    t.balance_sums = ampere::balance_sums;
    t.balance_sums_backward = ampere::balance_sums_backward;
    t.combine_rows = ampere::combine_rows;
    t.cast_all = ampere::cast_all;
    t.adamw_ = ampere::adamw_;
    t.sum_of_squares = ampere::sum_of_squares;
    t.refuses_device = on_device::refusal<cuda::check_ampere>;
    t.refuses_experts = ampere::refuses_experts;
    return t;
  }();
  return table;
}

}  // namespace moesh::kernels
