// The torch side of the kernels around the MoE layer (around.h): rows, heads and the loss. What
// they do not take goes to LibTorch's ops.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include "moesh/kernels/cuda/around.h"
#include "moesh/kernels/cuda/on_device.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::ampere {
namespace {

constexpr std::int64_t kMaxWidth = 8192;

/// [rows, width] with the features of a row side by side; a view where x allows it.
at::Tensor rows_of(const at::Tensor& x) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  return rows.stride(1) == 1 && rows.stride(0) % 8 == 0 && in_chunks(rows)
             ? rows
             : aligned(rows.contiguous());
}

bool takes_norm(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 && x.size(-1) >= 8 && x.size(-1) % 8 == 0 &&
         x.size(-1) <= kMaxWidth;
}

Norm norm_of(const at::Tensor& rows, const at::Tensor& weight_D, double eps) {
  return {.num_rows = rows.size(0),
          .width = rows.size(1),
          .stride = rows.size(0) > 1 ? rows.stride(0) : rows.size(1),
          .eps = static_cast<float>(eps),
          .weight = read_floats(weight_D)};
}

bool takes_rotation(const Rotation& r, const at::Tensor& x) {
  return takes_heads(x) && r.cos_Pf.size(1) >= 8 && r.cos_Pf.size(1) % 8 == 0;
}

Rope rope_of(const Rotation& r, const at::Tensor& x, bool adjoint) {
  return {.batch = x.size(0),
          .length = x.size(1),
          .num_heads = x.size(2),
          .num_kept = x.size(3) - 2 * r.cos_Pf.size(1),
          .num_turns = r.cos_Pf.size(1),
          .strides = {x.stride(0), x.stride(1), x.stride(2)},
          .leading = r.leading,
          .interleaved = r.interleaved,
          .adjoint = adjoint,
          .cos = read_floats(r.cos_Pf),
          .sin = read_floats(r.sin_Pf),
          .positions = read_longs(r.positions_BL)};
}

at::Tensor rotated(const Rotation& r, const at::Tensor& x, Argument argument, bool adjoint) {
  const auto turning = r.cos_Pf.size(1) / 8;
  const bool is_in_place = argument == Argument::consumed && 16 * turning < x.size(3) &&
                           turning <= 32 && (turning & (turning - 1)) == 0;
  const at::Tensor y = is_in_place ? x : fresh(x);
  OnDeviceOf{x}("rope", cuda::rope, rope_of(r, x, adjoint), in(x), out(y));
  return y;
}

bool takes_norm_of_heads(const Rotation& r, const at::Tensor& x, const at::Tensor& weight_d) {
  const auto width = x.size(3);
  return weight_d.defined() && !r.interleaved && takes_rotation(r, x) &&
         (width == 64 || width == 128 || width == 256) && x.numel() / width < std::int64_t{1} << 31;
}

NormOutput heads_forward(const Rotation& turn, const at::Tensor& x, const at::Tensor& weight,
                         double eps) {
  const NormOutput y{fresh(x), at::empty(x.sizes().slice(0, 3), x.options().dtype(at::kFloat))};
  OnDeviceOf{x}("norm_rope", norm_rope, rope_of(turn, x, false), read_floats(weight),
                static_cast<float>(eps), in(x), out(y.y), floats(y.r));
  return y;
}

NormGradients heads_backward(const Rotation& turn, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& r, const at::Tensor& dy) {
  const Rope rope = rope_of(turn, x, true);
  const auto wide = x.options().dtype(at::kFloat);
  const at::Tensor workspace = at::empty({norm_rope_workspace(rope)}, wide);
  const NormGradients d{fresh(x), at::empty(weight.sizes(), wide)};
  OnDeviceOf{x}("norm_rope_backward", norm_rope_backward, rope, read_floats(weight), in(x),
                read_floats(r), in(dy), floats(workspace), out(d.x), floats(d.weight_D));
  return d;
}

}  // namespace

NormOutput norm_forward(const at::Tensor& x, const at::Tensor& weight_D, double eps,
                        const std::optional<Rotation>& turn) {
  if (turn && takes_norm_of_heads(*turn, x, weight_D))
    return heads_forward(*turn, x, aligned(weight_D), eps);
  if (turn || !takes_norm(x)) return aten_kernels().norm_forward(x, weight_D, eps, turn);
  const at::Tensor rows = rows_of(x), weight = aligned(weight_D);
  const auto sizes = x.sizes();
  NormOutput y{at::empty(sizes, x.options()),
               at::empty(sizes.slice(0, sizes.size() - 1), x.options().dtype(at::kFloat))};
  OnDeviceOf{x}("norm", cuda::norm, norm_of(rows, weight, eps), in(rows), out(y.y), floats(y.r));
  return y;
}

NormGradients norm_backward(const at::Tensor& x, const at::Tensor& weight_D, const at::Tensor& r,
                            const at::Tensor& dy, const std::optional<Rotation>& turn,
                            const at::Tensor& beside) {
  if (turn && takes_norm_of_heads(*turn, x, weight_D) && !beside.defined())
    return heads_backward(*turn, x, aligned(weight_D), r, aligned(dy.contiguous()));
  if (turn || !takes_norm(x)) return aten_kernels().norm_backward(x, weight_D, r, dy, turn, beside);
  const at::Tensor rows = rows_of(x), weight = aligned(weight_D), dy_rows = aligned(plain(dy)),
                   beside_rows = aligned(plain(beside));
  const Norm norm = norm_of(rows, weight, 0);
  const auto wide = x.options().dtype(at::kFloat);
  const at::Tensor workspace = at::empty({norm_workspace(norm)}, wide);
  NormGradients d{fresh(x), {}};
  if (weight.defined()) d.weight_D = at::empty({norm.width}, wide);
  OnDeviceOf{x}("norm_backward", cuda::norm_backward, norm, in(rows), read_floats(r), in(dy_rows),
                in(beside_rows), floats(workspace), out(d.x), floats(d.weight_D));
  return d;
}

at::Tensor rotate_forward(const Rotation& rotation, const at::Tensor& x_BLhd, Argument x) {
  return takes_rotation(rotation, x_BLhd) ? rotated(rotation, x_BLhd, x, false)
                                          : aten_kernels().rotate_forward(rotation, x_BLhd, x);
}

at::Tensor rotate_backward(const Rotation& rotation, const at::Tensor& dy_BLhd, Argument dy) {
  return takes_rotation(rotation, dy_BLhd) ? rotated(rotation, dy_BLhd, dy, true)
                                           : aten_kernels().rotate_backward(rotation, dy_BLhd, dy);
}

namespace {

Sinks sinks_of(const at::Tensor& y) {  // [.., L, h, d]
  const auto length = y.size(-3), row = length * y.size(-2) * y.size(-1);
  return {.batch = row == 0 ? 0 : y.numel() / row,
          .length = length,
          .num_heads = y.size(-2),
          .width = y.size(-1)};
}

bool takes_sinks(const at::Tensor& y) {
  return y.scalar_type() == at::kBFloat16 && y.is_contiguous() && in_chunks(y) && y.size(-1) >= 8 &&
         y.size(-1) % 8 == 0 && y.size(-1) <= 256 && y.numel() < std::int64_t{1} << 34;
}

}  // namespace

at::Tensor add_sinks_(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h) {
  if (!takes_sinks(y)) return aten_kernels().add_sinks_(y, lse, sinks_h);
  at::Tensor with_sinks = fresh(lse);
  OnDeviceOf{y}("add_sinks", cuda::add_sinks, sinks_of(y), read_floats(sinks_h), read_floats(lse),
                out(y), floats(with_sinks));
  return with_sinks;
}

at::Tensor sink_gradient(const at::Tensor& y, const at::Tensor& lse, const at::Tensor& sinks_h,
                         const at::Tensor& dy) {
  if (!takes_sinks(y) || !in_chunks(dy)) return aten_kernels().sink_gradient(y, lse, sinks_h, dy);
  const Sinks sinks = sinks_of(y);
  const at::Tensor workspace = at::empty({sink_workspace(sinks)}, lse.options());
  at::Tensor d_sinks = fresh(sinks_h);
  OnDeviceOf{y}("sink_gradient", cuda::sink_gradient, sinks, read_floats(sinks_h), read_floats(lse),
                in(y), in(dy), floats(workspace), floats(d_sinks));
  return d_sinks;
}

namespace {

bool takes_logits(const at::Tensor& logits_NV) {
  return logits_NV.scalar_type() == at::kBFloat16 && logits_NV.size(1) >= 8 &&
         logits_NV.size(1) % 8 == 0 && in_chunks(logits_NV);
}

Logits logits_of(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  return {.num_tokens = logits_NV.size(0),
          .num_words = logits_NV.size(1),
          .label_N = read_longs(label_N)};
}

}  // namespace

LogitSums logit_sums(const at::Tensor& logits_NV, const at::Tensor& label_N) {
  if (!takes_logits(logits_NV)) return aten_kernels().logit_sums(logits_NV, label_N);
  const auto fresh = [&] {
    return at::empty({logits_NV.size(0)}, logits_NV.options().dtype(at::kFloat));
  };
  LogitSums sums{fresh(), fresh(), fresh()};
  OnDeviceOf{logits_NV}("logit_sums", cuda::logit_sums, logits_of(logits_NV, label_N),
                        in(logits_NV), floats(sums.max_N), floats(sums.sum_N),
                        floats(sums.picked_N));
  return sums;
}

at::Tensor logit_gradient_(const at::Tensor& logits_NV, const at::Tensor& label_N,
                           const at::Tensor& total_N, const at::Tensor& weight_N) {
  if (!takes_logits(logits_NV))
    return aten_kernels().logit_gradient_(logits_NV, label_N, total_N, weight_N);
  OnDeviceOf{logits_NV}("logit_gradient", cuda::logit_gradient, logits_of(logits_NV, label_N),
                        out(logits_NV), read_floats(total_N), read_floats(weight_N));
  return logits_NV;
}

namespace {

bool takes_few_heads(const at::Tensor& t) {
  return takes_heads(t) && t.numel() < std::int64_t{1} << 33;
}

HeadsAt heads_at(const at::Tensor& t) {  // a tensor of three dimensions has one head for all
  return {const_cast<void*>(t.const_data_ptr()),
          {t.stride(0), t.stride(1), t.dim() == 4 ? t.stride(2) : 0}};
}

Latent latent_of(const at::Tensor& kv, const at::Tensor& key, const at::Tensor& k,
                 const at::Tensor& v) {
  return {.batch = kv.size(0),
          .length = kv.size(1),
          .num_heads = kv.size(2),
          .num_own = kv.size(3) - v.size(3),
          .num_shared = key.size(2),
          .num_value = v.size(3),
          .kv = heads_at(kv),
          .key = heads_at(key),
          .k = heads_at(k),
          .v = heads_at(v)};
}

bool takes_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  return gate.scalar_type() == at::kBFloat16 && gate.numel() % 8 == 0 && in_chunks(gate) &&
         in_chunks(up);
}

}  // namespace

LatentHeads latent_heads_forward(const at::Tensor& kv, const at::Tensor& key,
                                 std::int64_t num_own) {
  if (!takes_few_heads(kv) || !takes_few_heads(key) || num_own % 8 != 0)
    return aten_kernels().latent_heads_forward(kv, key, num_own);
  const auto fresh = [&](std::int64_t width) {
    return at::empty({kv.size(0), kv.size(1), kv.size(2), width}, kv.options());
  };
  LatentHeads y{fresh(num_own + key.size(2)), fresh(kv.size(3) - num_own)};
  OnDeviceOf{kv}("latent_heads", cuda::latent_heads, latent_of(kv, key, y.k_BLhd, y.v_BLhv));
  return y;
}

LatentGradients latent_heads_backward(const at::Tensor& dk, const at::Tensor& dv,
                                      std::int64_t num_own) {
  if (!takes_few_heads(dk) || !takes_few_heads(dv) || num_own % 8 != 0)
    return aten_kernels().latent_heads_backward(dk, dv, num_own);
  LatentGradients d{
      at::empty({dk.size(0), dk.size(1), dk.size(2), num_own + dv.size(3)}, dk.options()),
      at::empty({dk.size(0), dk.size(1), dk.size(3) - num_own}, dk.options())};
  OnDeviceOf{dk}("latent_heads_backward", cuda::latent_heads_backward,
                 latent_of(d.kv, d.key, dk, dv));
  return d;
}

at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& up) {
  if (!takes_swiglu(gate, up)) return aten_kernels().swiglu_forward(gate, up);
  const at::Tensor h = fresh(gate);
  OnDeviceOf{gate}("dense_swiglu", dense_swiglu, in(gate), in(up), out(h), gate.numel());
  return h;
}

SwigluGradients swiglu_backward(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& dh,
                                bool wants_h) {
  if (!takes_swiglu(gate, up) || !in_chunks(dh))
    return aten_kernels().swiglu_backward(gate, up, dh, wants_h);
  const SwigluGradients d{fresh(gate), fresh(gate), wants_h ? dh : at::Tensor()};
  OnDeviceOf{gate}("dense_swiglu_backward", dense_swiglu_backward, in(gate), in(up), in(dh),
                   out(d.gate), out(d.up), out(d.h), gate.numel());
  return d;
}

namespace {

WindowAttention window_of(const AttentionConfig& c, const AttentionInput& in) {
  const auto &q = in.q_BLhd, &k = in.k_BSgd;
  return {.batch = q.size(0),
          .length = q.size(1),
          .num_heads = q.size(2),
          .num_groups = k.size(2),
          .window = c.window,
          .scale = static_cast<float>(c.scale),
          .q = heads_at(q),
          .k = heads_at(k),
          .v = heads_at(in.v_BSgv),
          .sinks = read_floats(in.sinks_h)};
}

}  // namespace

bool takes_attention(const AttentionConfig& c, const AttentionInput& a) {
  const auto &q = a.q_BLhd, &k = a.k_BSgd, &v = a.v_BSgv;
  return q.size(3) == 64 && v.size(3) == 64 && c.window > 0 && c.window <= 128 &&
         c.window < k.size(1) && (c.chunk == 0 || c.chunk >= k.size(1)) && c.start == 0 &&
         q.size(1) == k.size(1) && !a.starts_BL.defined() && q.numel() > 0 && takes_few_heads(q) &&
         takes_few_heads(k) && takes_few_heads(v);
}

AttentionOutput attention_forward(const AttentionConfig& c, const AttentionInput& a) {
  const auto& q = a.q_BLhd;
  const AttentionOutput made{
      fresh(q), at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kFloat))};
  OnDeviceOf{q}("window_attention", window_attention, window_of(c, a), out(made.y_BLhv),
                floats(made.lse_BhL));
  return made;
}

AttentionGradients attention_backward(const AttentionConfig& c, const AttentionInput& a,
                                      const AttentionOutput& made, const at::Tensor& dy_BLhv) {
  AttentionGradients d{fresh(a.q_BLhd), fresh(a.k_BSgd), fresh(a.v_BSgv), {}};
  const at::Tensor y = aligned(made.y_BLhv.contiguous()), dy = aligned(dy_BLhv.contiguous()),
                   dots_BhL = fresh(made.lse_BhL);
  OnDeviceOf{y}("window_attention_backward", window_attention_backward, window_of(c, a), in(y),
                read_floats(made.lse_BhL), in(dy), floats(dots_BhL), out(d.q_BLhd), out(d.k_BSgd),
                out(d.v_BSgv));
  if (a.sinks_h.defined())
    d.sinks_h = (a.sinks_h.unsqueeze(1) - made.lse_BhL)
                    .exp_()
                    .mul_(dots_BhL)
                    .sum(at::IntArrayRef({0, 2}))
                    .neg_();
  return d;
}

void add_rowwise(KernelTable& t) {
  t.takes_attention = takes_attention;
  t.attention_forward = attention_forward;
  t.attention_backward = attention_backward;
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

}  // namespace moesh::kernels::ampere
