#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/square.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <numeric>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {

namespace {

struct Pairs {
  at::Tensor a, b;
};

// The features that turn, as pairs in the type of the table.
Pairs pairs_of(const at::Tensor& turning, at::ScalarType wide, bool interleaved) {
  const at::Tensor x = turning.to(wide);
  const std::int64_t half = x.size(-1) / 2;
  if (!interleaved) return {x.narrow(-1, 0, half), x.narrow(-1, half, half)};
  const at::Tensor pairs = x.unflatten(-1, {half, 2});
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}

// [L, 1, f], or [B, L, 1, f] where tokens have lines of their own.
at::Tensor of_tokens(const at::Tensor& table_Pf, const Rotation& r) {
  if (!r.positions_BL.defined()) return table_Pf.unsqueeze(1);
  return table_Pf.index_select(0, r.positions_BL.flatten())
      .reshape({r.positions_BL.size(0), r.positions_BL.size(1), 1, table_Pf.size(1)});
}

// x, whose turning features are replaced.
at::Tensor joined(const at::Tensor& x, const Rotation& r, const at::Tensor& turned) {
  const at::Tensor rounded = turned.to(x.scalar_type());
  const std::int64_t turning = rounded.size(-1), num_kept = x.size(-1) - turning;
  if (num_kept == 0) return rounded;
  const at::Tensor kept = x.narrow(-1, r.leading ? turning : 0, num_kept);
  return r.leading ? at::cat({rounded, kept}, -1) : at::cat({kept, rounded}, -1);
}

at::Tensor turning_of(const at::Tensor& x, const Rotation& r) {
  const std::int64_t turning = 2 * r.cos_Pf.size(1);
  return x.narrow(-1, r.leading ? 0 : x.size(-1) - turning, turning);
}

}  // namespace

NormOutput norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                        const std::optional<Rotation>& turn) {
  const at::Tensor v = x.to(wide(x));
  const at::Tensor r = at::mean(at::square(v), {-1}).add_(eps).rsqrt_();
  at::Tensor y = v * r.unsqueeze(-1);
  if (weight_D.defined()) y.mul_(weight_D);
  y = y.to(x.scalar_type());
  return {turn ? rotate_forward(*turn, y, Argument::kept) : y, r};
}

NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& r,
                            const at::Tensor& dy, const std::optional<Rotation>& turn,
                            const at::Tensor& beside) {
  const at::Tensor scale = r.unsqueeze(-1), normal = x.to(wide(x)) * scale;
  at::Tensor d = (turn ? rotate_backward(*turn, dy, Argument::kept) : dy).to(wide(x));
  NormGradients out;
  if (weight_D.defined()) {
    std::vector<std::int64_t> rows(static_cast<size_t>(x.dim() - 1));
    std::iota(rows.begin(), rows.end(), 0);
    const at::Tensor terms = d * normal;
    out.weight_D = rows.empty() ? terms : terms.sum(rows);
    d = d * weight_D;
  }
  const at::Tensor along = at::mean(d * normal, {-1}, /*keepdim=*/true);
  out.x = (d - normal * along).mul_(scale).to(x.scalar_type());
  if (beside.defined()) out.x.add_(beside);
  return out;
}

at::Tensor rotate_forward(const Rotation& r, const at::Tensor& x, Argument) {
  const auto [a, b] = pairs_of(turning_of(x, r), r.cos_Pf.scalar_type(), r.interleaved);
  const at::Tensor cos = of_tokens(r.cos_Pf, r), sin = of_tokens(r.sin_Pf, r);
  return joined(x, r, at::cat({a * cos - b * sin, b * cos + a * sin}, -1));
}

at::Tensor rotate_backward(const Rotation& r, const at::Tensor& dy, Argument) {
  const auto [a, b] = pairs_of(turning_of(dy, r), r.cos_Pf.scalar_type(), false);
  const at::Tensor cos = of_tokens(r.cos_Pf, r), sin = of_tokens(r.sin_Pf, r);
  const at::Tensor da = a * cos + b * sin, db = b * cos - a * sin;
  return joined(dy, r, r.interleaved ? at::stack({da, db}, -1).flatten(-2) : at::cat({da, db}, -1));
}

LatentHeads latent_heads_forward(const at::Tensor& kv, const at::Tensor& key,
                                 std::int64_t num_own) {
  const at::Tensor shared = key.unsqueeze(2).expand({-1, -1, kv.size(2), -1});
  return {at::cat({kv.narrow(3, 0, num_own), shared}, 3),
          kv.narrow(3, num_own, kv.size(3) - num_own).contiguous()};
}

LatentGradients latent_heads_backward(const at::Tensor& dk, const at::Tensor& dv,
                                      std::int64_t num_own) {
  return {at::cat({dk.narrow(3, 0, num_own), dv}, 3),
          at::sum(dk.narrow(3, num_own, dk.size(3) - num_own), {2}, /*keepdim=*/false, wide(dk))
              .to(dk.scalar_type())};
}

at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate.to(wide(gate))).mul_(up).to(gate.scalar_type());
}

SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dh,
                                bool wants_h) {
  const at::Tensor g = gate.to(wide(gate)), d = dh.to(wide(gate)), sigma = at::sigmoid(g);
  const at::Tensor slope = sigma * (1 + g * (1 - sigma));  // of silu
  SwigluGradients out{(d * up * slope).to(gate.scalar_type()),
                      (d * g).mul_(sigma).to(gate.scalar_type())};
  if (wants_h) out.h = at::Tensor(dh).copy_(swiglu_forward(gate, up));
  return out;
}

at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h) {
  at::Tensor with_sinks = at::logaddexp(lse, sinks_h.unsqueeze(1));
  const at::Tensor share = (lse - with_sinks).exp_().transpose(-2, -1);
  at::Tensor out = y;
  at::mul_out(out, y, share.unsqueeze(-1));
  return with_sinks;
}

at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h,
                         const at::Tensor& dy) {
  const at::Tensor dot = dy.to(lse.scalar_type()).mul(y).sum(at::IntArrayRef{-1}).transpose(-2, -1);
  const at::Tensor share = (sinks_h.unsqueeze(1) - lse).exp_();
  return share.mul_(dot).movedim(-2, 0).flatten(1).sum(1).neg_();
}

LogitSums logit_sums(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  const at::ScalarType dtype = wide(logits_NV);
  const auto options = logits_NV.options().dtype(dtype);
  const std::int64_t N = logits_NV.size(0);
  if (logits_NV.size(1) == 0)
    return {at::full({N}, -INFINITY, options), at::zeros({N}, options), at::zeros({N}, options)};
  const at::Tensor x = logits_NV.to(dtype), max_N = x.amax(1);
  return {max_N, (x - max_N.unsqueeze(1)).exp_().sum(1),
          x.gather(1, label_N.clamp_min(0).unsqueeze(1)).squeeze(1) * label_N.ge(0).to(dtype)};
}

at::Tensor logit_gradient_(const at::Tensor& logits_NV, const at::Tensor& label_N,
                           const at::Tensor& total_N, const at::Tensor& weight_N) {
  if (logits_NV.size(1) == 0) return logits_NV;
  const auto wide = total_N.scalar_type();
  const at::Tensor d = logits_NV.to(wide);  // itself where it is wide
  d.sub_(total_N.unsqueeze(1)).exp_();
  d.scatter_add_(1, label_N.clamp_min(0).unsqueeze(1), -label_N.ge(0).to(wide).unsqueeze(1));
  d.mul_(weight_N.unsqueeze(1));
  return d.is_same(logits_NV) ? logits_NV : logits_NV.copy_(d);
}

void add_rowwise(KernelTable& t) {
  t.norm_forward = norm_forward;
  t.norm_backward = norm_backward;
  t.rotate_forward = rotate_forward;
  t.rotate_backward = rotate_backward;
  t.latent_heads_forward = latent_heads_forward;
  t.latent_heads_backward = latent_heads_backward;
  t.swiglu_forward = swiglu_forward;
  t.swiglu_backward = swiglu_backward;
  t.add_sinks_ = add_sinks_;
  t.sink_gradient = sink_gradient;
  t.logit_sums = logit_sums;
  t.logit_gradient_ = logit_gradient_;
}

}  // namespace moesh::kernels::aten
