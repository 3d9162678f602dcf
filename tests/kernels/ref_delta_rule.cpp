#include "tests/kernels/ref_delta_rule.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace moesh::kernels::ref {
namespace {

// The position at which the document of a token begins.
std::int64_t start_of(const at::Tensor& starts_BL, std::int64_t b, std::int64_t t) {
  return starts_BL.defined() ? starts_BL[b][t].item<std::int64_t>() : 0;
}

}  // namespace

DeltaRuleOutput delta_rule(const DeltaRuleInput& in) {
  const std::int64_t B = in.qkv_BLgc.size(0), L = in.qkv_BLgc.size(1), H = in.decay_BLh.size(2),
                     group = H / in.qkv_BLgc.size(2), d = in.key_dim,
                     values = in.qkv_BLgc.size(3) - 2 * d;
  const auto unit = [&](std::int64_t first) {
    const at::Tensor x = in.qkv_BLgc.narrow(3, first, d);
    return x / (x.square().sum(-1, true) + 1e-6).sqrt();
  };
  const at::Tensor q = unit(0) / std::sqrt(static_cast<double>(d)), k = unit(d),
                   v = in.qkv_BLgc.narrow(3, 2 * d, values).reshape({B, L, H, values / group});
  std::vector<at::Tensor> sequences, states;
  for (std::int64_t b = 0; b < B; ++b) {
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < H; ++h) {
      const at::Tensor zero = at::zeros({q.size(3), v.size(3)}, v.options());
      at::Tensor S = in.state_Bhdv.defined() ? in.state_Bhdv[b][h] : zero;
      std::vector<at::Tensor> tokens;
      for (std::int64_t t = 0; t < L; ++t) {
        if (in.starts_BL.defined() && start_of(in.starts_BL, b, t) == t) S = zero;
        const at::Tensor key = k[b][t][h / group];
        S = in.decay_BLh[b][t][h].exp() * S;
        const at::Tensor missing = v[b][t][h] - key.matmul(S);
        S = S + at::outer(key, in.beta_BLh[b][t][h] * missing);
        tokens.push_back(q[b][t][h / group].matmul(S));
      }
      heads.push_back(at::stack(tokens));
      states.push_back(S);
    }
    sequences.push_back(at::stack(heads, 1));
  }
  return {at::stack(sequences), at::stack(states).unflatten(0, {B, H})};
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const at::Tensor& starts_BL) {
  const std::int64_t num_taps = w.size(2);
  std::vector<at::Tensor> sequences;
  for (std::int64_t b = 0; b < x.size(0); ++b) {
    std::vector<at::Tensor> tokens;
    for (std::int64_t t = 0; t < x.size(1); ++t) {
      at::Tensor sum = at::zeros({x.size(2), x.size(3)}, x.options());
      for (std::int64_t tap = 0; tap < num_taps; ++tap) {
        const std::int64_t from = t - (num_taps - 1 - tap);
        if (from >= start_of(starts_BL, b, t)) sum = sum + w.select(2, tap) * x[b][from];
      }
      tokens.push_back(at::silu(sum));
    }
    sequences.push_back(at::stack(tokens));
  }
  return at::stack(sequences);
}

}  // namespace moesh::kernels::ref
