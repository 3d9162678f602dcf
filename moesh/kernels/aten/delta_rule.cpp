// The gated delta rule in chunks, with LibTorch's products of matrices. n chunks, C tokens of each,
// r value heads of a key head
//
// In a chunk that begins with the state S, with c_i the sum of the decays up to token i,
//
//   M_ij = exp(c_i - c_j) for j <= i,   e_i = exp(c_i),   f_i = exp(c_last - c_i),
//   A_ij = beta_i M_ij <k_i, k_j> for j < i,   P_ij = M_ij <q_i, k_j>,
//
// the corrections N of its tokens solve (1 + A) N = beta v - (beta e k) S, and
//
//   y = (e q) S + P N,   S' = e_last S + (f k)' N.
//
// A document that begins within a chunk cuts M, and e and f beyond it are zero: nothing divides by
// what has decayed, and a new document needs no other code.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>

#include "moesh/kernels/check.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::aten {
namespace {

// X of (1 + a) X = b, or with its transpose; a is strictly lower.
at::Tensor solve(const at::Tensor& a, const at::Tensor& b, bool transposed) {
  if (b.is_meta()) return at::empty(b.sizes(), b.options());  // LibTorch has it in Python only
  return at::linalg_solve_triangular(transposed ? a.transpose(-2, -1) : a, b, /*upper=*/transposed,
                                     /*left=*/true, /*unitriangular=*/true);
}

// Which of the tokens j of a chunk are at i or before, or only before: bool [i, j].
at::Tensor up_to(std::int64_t C, at::Device device) {
  const at::Tensor i = at::arange(C, at::TensorOptions(device).dtype(at::kLong));
  return i.unsqueeze(1) >= i;
}
at::Tensor before(std::int64_t C, at::Device device) {
  const at::Tensor i = at::arange(C, at::TensorOptions(device).dtype(at::kLong));
  return i.unsqueeze(1) > i;
}

// x [B, L, ..] with `num_first` zeros in front of its tokens and `num_last` behind them.
at::Tensor with_zeros(const at::Tensor& x, std::int64_t num_first, std::int64_t num_last) {
  const auto zeros = [&](std::int64_t count) {
    auto sizes = x.sizes().vec();
    sizes[1] = count;
    return at::zeros(sizes, x.options());
  };
  return at::cat({zeros(num_first), x, zeros(num_last)}, 1);
}

// The sum over a dimension, which stays.
at::Tensor sum_over(std::int64_t dim, const at::Tensor& x) {
  return x.sum(at::IntArrayRef(dim), /*keepdim=*/true);
}
at::Tensor over_features(const at::Tensor& x) { return sum_over(-1, x); }
at::Tensor over_group(const at::Tensor& x) { return sum_over(2, x); }

// How tokens lie in chunks; the last one is filled up with tokens that do nothing.
struct Cut {
  std::int64_t B, L, g, n, C;

  Cut(const DeltaRuleInput& in, std::int64_t chunk)
      : B(in.qkv_BLgc.size(0)),
        L(in.qkv_BLgc.size(1)),
        g(in.qkv_BLgc.size(2)),
        n((L + chunk - 1) / chunk),
        C(chunk) {}

  // [B, L, heads, x] -> [B, g, heads / g, n, C, x], and back.
  at::Tensor chunks(const at::Tensor& x, at::ScalarType dtype) const {
    return with_zeros(x.to(dtype), 0, n * C - L)
        .reshape({B, n, C, g, x.size(2) / g, x.size(3)})
        .permute({0, 3, 4, 1, 2, 5});
  }
  at::Tensor tokens(const at::Tensor& x) const {
    return x.permute({0, 3, 4, 1, 2, 5})
        .reshape({B, n * C, x.size(1) * x.size(2), x.size(5)})
        .narrow(1, 0, L);
  }
};

struct Chunks {
  at::Tensor q, k;              // [B, g, 1, n, C, d]: of length 1 (q: / sqrt(d))
  at::Tensor q_scale, k_scale;  // [B, g, 1, n, C, 1]: of what they were
  at::Tensor v, beta, e, f;     // [B, g, r, n, C, v or 1]
  at::Tensor last;              // e of the last token [B, g, r, n, 1, 1]
  at::Tensor m, a, p;           // [B, g, r, n, C, C]
  at::Tensor u, w;              // (1 + A)^-1 of beta v and of beta e k
};

Chunks prepared(const DeltaRuleInput& in, const Cut& cut) {
  const auto dtype = wide(in.qkv_BLgc);
  const std::int64_t d = in.key_dim, c = in.qkv_BLgc.size(3);
  Chunks x;
  const auto unit = [&](std::int64_t first, double length, at::Tensor& scale) {
    const at::Tensor v = cut.chunks(in.qkv_BLgc.narrow(3, first, d), dtype);
    scale = length * (over_features(v.square()) + 1e-6).rsqrt();
    return v * scale;
  };
  x.q = unit(0, 1 / std::sqrt(static_cast<double>(d)), x.q_scale), x.k = unit(d, 1, x.k_scale);
  x.v = cut.chunks(in.qkv_BLgc.narrow(3, 2 * d, c - 2 * d).reshape(in.y_sizes()), dtype);
  x.beta = cut.chunks(in.beta_BLh.unsqueeze(-1), dtype);
  const at::Tensor sums = cut.chunks(in.decay_BLh.unsqueeze(-1), dtype).cumsum(4),
                   last = sums.narrow(4, cut.C - 1, 1);
  const auto device = in.qkv_BLgc.device();
  at::Tensor seen = up_to(cut.C, device);
  x.e = sums.exp(), x.f = (last - sums).exp();
  if (in.starts_BL.defined()) {
    // The padding of the last chunk belongs to the last document.
    const at::Tensor filled = at::cat(
        {in.starts_BL, in.starts_BL.narrow(1, cut.L - 1, 1).expand({cut.B, cut.n * cut.C - cut.L})},
        1);
    const at::Tensor start = filled.reshape({cut.B, 1, 1, cut.n, cut.C, 1}),
                     first = (at::arange(cut.n, filled.options()) * cut.C).reshape({cut.n, 1, 1});
    seen = seen.logical_and(start == start.transpose(-2, -1));
    x.e = x.e * (start < first).to(dtype);
    x.f = x.f * (start == start.narrow(4, cut.C - 1, 1)).to(dtype);
  }
  x.last = x.e.narrow(4, cut.C - 1, 1);
  x.m = (sums - sums.transpose(-2, -1))
            .masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity())
            .exp();
  const at::Tensor keys = x.k.transpose(-2, -1);
  x.a = x.m * at::matmul(x.k, keys) * x.beta * before(cut.C, device).to(dtype);
  x.p = x.m * at::matmul(x.q, keys);
  const at::Tensor solved =
      solve(x.a, at::cat({x.beta * x.v, x.beta * x.e * x.k}, -1), /*transposed=*/false);
  x.u = solved.narrow(-1, 0, x.v.size(-1));
  x.w = solved.narrow(-1, x.v.size(-1), x.k.size(-1));
  return x;
}

struct Scan {
  at::Tensor n;       // corrections [B, g, r, n, C, v]
  at::Tensor states;  // before each chunk [B, g, r, n, d, v]
  at::Tensor after;   // [B, g, r, d, v]
};

Scan scanned(const Chunks& x, const at::Tensor& state_Bhdv) {
  const auto B = x.v.size(0), g = x.v.size(1), r = x.v.size(2), d = x.k.size(5), v = x.v.size(5);
  Scan out;
  out.after = state_Bhdv.defined() ? state_Bhdv.to(x.v.scalar_type()).reshape({B, g, r, d, v})
                                   : at::zeros({B, g, r, d, v}, x.v.options());
  const at::Tensor writes = (x.f * x.k).transpose(-2, -1);
  std::vector<at::Tensor> corrections, states;
  for (std::int64_t i = 0; i < x.v.size(3); ++i) {
    states.push_back(out.after);
    corrections.push_back(x.u.select(3, i) - at::matmul(x.w.select(3, i), out.after));
    out.after =
        x.last.select(3, i) * out.after + at::matmul(writes.select(3, i), corrections.back());
  }
  out.n = at::stack(corrections, 3), out.states = at::stack(states, 3);
  return out;
}

DeltaRuleOutput delta_rule_forward(const DeltaRuleInput& in, std::int64_t chunk) {
  const Cut cut(in, chunk);
  const Chunks x = prepared(in, cut);
  const Scan s = scanned(x, in.state_Bhdv);
  const at::Tensor y = at::matmul(x.e * x.q, s.states) + at::matmul(x.p, s.n);
  return {cut.tokens(y).to(in.qkv_BLgc.scalar_type()), s.after.flatten(1, 2)};
}

DeltaRuleGradients delta_rule_backward(const DeltaRuleInput& in, const at::Tensor& dy_BLhv,
                                       std::int64_t chunk) {
  const Cut cut(in, chunk);
  const Chunks x = prepared(in, cut);
  const Scan s = scanned(x, in.state_Bhdv);
  const at::Tensor dy = cut.chunks(dy_BLhv, wide(in.qkv_BLgc)), reads = x.e * x.q,
                   writes = x.f * x.k;

  // From the last chunk to the first: the gradient of the state after each, and of its corrections.
  const at::Tensor dn_of_y = at::matmul(x.p.transpose(-2, -1), dy),
                   ds_of_y = at::matmul(reads.transpose(-2, -1), dy);
  at::Tensor ds = at::zeros_like(s.after);
  std::vector<at::Tensor> dn_of(static_cast<std::size_t>(cut.n)), ds_after(dn_of.size());
  for (std::int64_t i = cut.n - 1; i >= 0; --i) {
    const auto at_i = static_cast<std::size_t>(i);
    ds_after[at_i] = ds;
    dn_of[at_i] = dn_of_y.select(3, i) + at::matmul(writes.select(3, i), ds);
    ds = x.last.select(3, i) * ds + ds_of_y.select(3, i) -
         at::matmul(x.w.select(3, i).transpose(-2, -1), dn_of[at_i]);
  }
  const at::Tensor dn = at::stack(dn_of, 3), d_after = at::stack(ds_after, 3),
                   states = s.states.transpose(-2, -1);

  // N = u - w S, where u and w solve with 1 + A: what is solved with its transpose is the gradient
  // of the right sides, and its products with u and w are that of A.
  const at::Tensor right =
      solve(x.a, at::cat({dn, -at::matmul(dn, states)}, -1), /*transposed=*/true);
  const at::Tensor d_right_v = right.narrow(-1, 0, x.v.size(-1)),
                   d_right_k = right.narrow(-1, x.v.size(-1), x.k.size(-1));
  const auto dtype = dy.scalar_type();
  const at::Tensor da = (at::matmul(d_right_v, x.u.transpose(-2, -1)) +
                         at::matmul(d_right_k, x.w.transpose(-2, -1)))
                            .neg() *
                        before(cut.C, dy.device()).to(dtype),
                   dp = at::matmul(dy, s.n.transpose(-2, -1));
  const at::Tensor d_reads = at::matmul(dy, states),
                   d_writes = at::matmul(s.n, d_after.transpose(-2, -1));

  const at::Tensor of_a = da * x.m, of_p = dp * x.m;
  // beta k, wherever it stands on the left
  const at::Tensor d_beta_k = at::matmul(of_a, x.k) + x.e * d_right_k;
  const at::Tensor dq = over_group(at::matmul(of_p, x.k) + x.e * d_reads);
  const at::Tensor dk =
      over_group(at::matmul(of_a.transpose(-2, -1), x.beta * x.k) +
                 at::matmul(of_p.transpose(-2, -1), x.q) + x.f * d_writes + x.beta * d_beta_k);
  const at::Tensor d_beta = over_features(d_beta_k * x.k) + over_features(d_right_v * x.v);

  // The decays, by way of their sums c.
  const at::Tensor pairs = da * x.a + dp * x.p;
  const at::Tensor of_e = x.e *
                          (over_features(d_reads * x.q) + over_features(d_right_k * x.beta * x.k)),
                   of_f = x.f * over_features(d_writes * x.k);
  at::Tensor dc = over_features(pairs) - sum_over(-2, pairs).transpose(-2, -1) + of_e - of_f;
  const at::Tensor of_last =
      sum_over(-2, of_f) + x.last * sum_over(-2, over_features(d_after * s.states));
  dc.narrow(4, cut.C - 1, 1).add_(of_last);
  // c_i has the decays up to that of i.
  const at::Tensor after = up_to(cut.C, dy.device()).to(dtype).t();
  // A vector of length `length` does not change along itself.
  const auto of_unit = [](const at::Tensor& gradient, const at::Tensor& unit,
                          const at::Tensor& scale, double length) {
    return scale * (gradient - unit * over_features(gradient * unit) / (length * length));
  };
  const auto d = static_cast<double>(in.key_dim);
  const at::Tensor d_values = cut.tokens(x.beta * d_right_v);
  return {at::cat({cut.tokens(of_unit(dq, x.q, x.q_scale, 1 / std::sqrt(d))),
                   cut.tokens(of_unit(dk, x.k, x.k_scale, 1)),
                   d_values.reshape({cut.B, cut.L, cut.g, -1})},
                  3)
              .to(in.qkv_BLgc.scalar_type()),
          cut.tokens(at::matmul(after, dc)).squeeze(3), cut.tokens(d_beta).squeeze(3)};
}

// Whether the token `shift` before each is of its document [B, L, 1, 1]; undefined: all are.
at::Tensor same_document(const at::Tensor& starts_BL, std::int64_t shift, at::ScalarType dtype) {
  if (!starts_BL.defined()) return {};
  const at::Tensor from = at::arange(-shift, starts_BL.size(1) - shift, starts_BL.options());
  return (starts_BL <= from).to(dtype).unsqueeze(-1).unsqueeze(-1);
}

at::Tensor masked(const at::Tensor& x, const at::Tensor& mask) {
  return mask.defined() ? x * mask : x;
}

// Before silu; `x` has K - 1 zeros in front.
at::Tensor convolved(const at::Tensor& x, const at::Tensor& w, const at::Tensor& starts_BL) {
  const std::int64_t last = w.size(2) - 1, L = x.size(1) - last;
  at::Tensor z = x.narrow(1, last, L) * w.select(2, last);
  for (std::int64_t shift = 1; shift <= last; ++shift)
    z = z + masked(x.narrow(1, last - shift, L), same_document(starts_BL, shift, w.scalar_type())) *
                w.select(2, last - shift);
  return z;
}

at::Tensor padded_for(const at::Tensor& w, const at::Tensor& x) {
  return with_zeros(x.to(w.scalar_type()), w.size(2) - 1, 0);
}

at::Tensor convolution_forward(const at::Tensor& x, const at::Tensor& w,
                               const at::Tensor& starts_BL) {
  return at::silu(convolved(padded_for(w, x), w, starts_BL)).to(x.scalar_type());
}

ConvolutionGradients convolution_backward(const at::Tensor& x, const at::Tensor& w,
                                          const at::Tensor& starts_BL, const at::Tensor& dy) {
  const std::int64_t last = w.size(2) - 1, L = x.size(1);
  const at::Tensor padded = padded_for(w, x), z = convolved(padded, w, starts_BL),
                   sigma = at::sigmoid(z);
  const at::Tensor dz = dy.to(w.scalar_type()) * sigma * (1 + z * (1 - sigma));
  const at::Tensor dx = at::zeros(padded.sizes(), padded.options());
  std::vector<at::Tensor> dw;
  for (std::int64_t shift = last; shift >= 0; --shift) {
    const at::Tensor d = masked(dz, same_document(starts_BL, shift, w.scalar_type()));
    dw.push_back((d * padded.narrow(1, last - shift, L)).flatten(0, 1).sum(0));
    dx.narrow(1, last - shift, L).add_(d * w.select(2, last - shift));
  }
  return {dx.narrow(1, last, L).to(x.scalar_type()), at::stack(dw, 2)};
}

}  // namespace

void add_delta_rule(KernelTable& t) {
  t.delta_rule_forward = delta_rule_forward;
  t.delta_rule_backward = delta_rule_backward;
  t.convolution_forward = convolution_forward;
  t.convolution_backward = convolution_backward;
}

}  // namespace moesh::kernels::aten
