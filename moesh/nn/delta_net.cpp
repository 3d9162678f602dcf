// B batch, L tokens, g key heads of this tp rank, h value heads, d width of a key, v of a value

#include "moesh/nn/delta_net.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/kernels/attention.h"
#include "moesh/spmd/attach.h"

namespace moesh::nn {
namespace {

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const at::Tensor& starts_BL) {
  return raw::differentiable({x, w}, [&]() -> raw::Differentiable {
    return {{kernels::convolution_forward(x, w, starts_BL)},
            {x, w, starts_BL},
            [](const auto& saved, const auto& dy) {
              const auto d = kernels::convolution_backward(saved[0], saved[1], saved[2], dy[0]);
              return raw::Tensors{d.x, d.w};
            }};
  })[0];
}

at::Tensor delta_rule(const at::Tensor& qkv, const at::Tensor& decay, const at::Tensor& beta,
                      const at::Tensor& starts_BL, std::int64_t key_dim, std::int64_t chunk) {
  constexpr const char* kWhat = "the delta rule";
  const auto forward = [&] {
    if (const auto first = raw::recall(kWhat)) return (*first)[0];
    const at::Tensor y =
        kernels::delta_rule_forward({qkv, decay, beta, key_dim, starts_BL}, chunk).y_BLhv;
    raw::keep(kWhat, {y});
    return y;
  };
  return raw::differentiable({qkv, decay, beta}, [&]() -> raw::Differentiable {
    return {{forward()},
            {qkv, decay, beta, starts_BL},
            [key_dim, chunk](const auto& s, const auto& dy) {
              const auto d =
                  kernels::delta_rule_backward({s[0], s[1], s[2], key_dim, s[3]}, dy[0], chunk);
              return raw::Tensors{d.qkv_BLgc, d.decay_BLh, d.beta_BLh};
            }};
  })[0];
}

// silu of the convolution. With a `kv_cache` it goes on where that ended.
at::Tensor convolved(const at::Tensor& x_BLgc, const at::Tensor& w_gcK, const at::Tensor& starts_BL,
                     KvCache* kv_cache) {
  if (!kv_cache) return convolution(x_BLgc, w_gcK, starts_BL);
  at::Tensor& kept = kv_cache->carried().inputs;
  const at::Tensor all = kept.defined() ? at::cat({kept, x_BLgc}, 1) : x_BLgc;
  const std::int64_t num_before = all.size(1) - x_BLgc.size(1),
                     num_kept = std::min(all.size(1), w_gcK.size(2) - 1);
  kept = all.narrow(1, all.size(1) - num_kept, num_kept);
  return kernels::convolution_forward(all, w_gcK, {}).narrow(1, num_before, x_BLgc.size(1));
}

}  // namespace

void DeltaNetConfig::validate() const {
  const Mesh& mesh = current_mesh();
  MOESH_CHECK(num_key_heads >= 1 && num_value_heads >= 1 && num_value_heads % num_key_heads == 0,
              ErrorKind::config, "delta net: num_value_heads = ", num_value_heads,
              " do not divide among num_key_heads = ", num_key_heads, "; choose a multiple");
  MOESH_CHECK(num_key_heads % mesh.size(tp) == 0, ErrorKind::config,
              "delta net: num_key_heads = ", num_key_heads,
              " is not divisible by tp = ", mesh.size(tp), "; choose a tp that divides the heads");
  MOESH_CHECK(mesh.size(cp) == 1, ErrorKind::config, "delta net: cp is ", mesh.size(cp),
              ", and a state goes from token to token; set parallelism.context_parallel_degree to ",
              "1, and use parallelism.tensor_parallel_degree instead");
  MOESH_CHECK(key_dim >= 1 && value_dim >= 1 && num_taps >= 1, ErrorKind::config,
              "delta net: heads of ", key_dim, " and ", value_dim, " features, ", num_taps,
              " taps; each takes 1 or more");
}

DeltaNet::DeltaNet(const DeltaNetConfig& c, const std::string& name, const ModuleOptions& o)
    : config_((c.validate(), c)),
      group_(c.num_value_heads / c.num_key_heads),
      qkvz_(column(name + ".in_proj_qkvz",
                   2 * (c.num_key_heads * c.key_dim + c.num_value_heads * c.value_dim), c.dim, o)),
      ba_(column(name + ".in_proj_ba", 2 * c.num_value_heads, c.dim, o.without_float8())),
      norm_(name + ".norm", c.value_dim, c.norm_eps, o),
      out_(row(name + ".out_proj", c.dim, c.num_value_heads * c.value_dim, o)) {
  // Taps are few, and the others are exponents.
  const auto wide = [&](const std::string& part, std::vector<std::int64_t> shape,
                        const Init& init) {
    return Cut(o.wide_spec(name + part, std::move(shape), {{tp, 0}}), init);
  };
  const std::int64_t keys = c.num_key_heads * c.key_dim, values = c.num_value_heads * c.value_dim;
  conv_q_ = wide(".conv1d.q", {keys, c.num_taps}, o.init);
  conv_k_ = wide(".conv1d.k", {keys, c.num_taps}, o.init);
  conv_v_ = wide(".conv1d.v", {values, c.num_taps}, o.init);
  a_log_ =
      wide(".A_log", {c.num_value_heads},
           {.kind = Init::Distribution::log_uniform, .scale = c.most_decay, .seed = o.init.seed});
  dt_bias_ = wide(".dt_bias", {c.num_value_heads}, {.kind = Init::Distribution::ones});
}

std::int64_t DeltaNet::chunk() const {
  return std::clamp<std::int64_t>(config_.key_dim / 2, 4, 64);
}

Sum DeltaNet::operator()(const Full& x_BLD, const Tokens& tokens, KvCache* kv_cache,
                         MaxLogits* /*logits*/) const {
  const std::int64_t d = config_.key_dim, v = config_.value_dim, values = group_ * v;
  const at::Tensor numbers = tokens.span_numbers();
  const Heads qkvz = split_heads(qkvz_(x_BLD, numbers), 2 * d + 2 * values),
              ba = split_heads(ba_(x_BLD, numbers), 2 * group_);
  const Heads qkv = map_heads(
      [&](const at::Tensor& x_BLgc, const at::Tensor& q, const at::Tensor& k, const at::Tensor& w,
          const at::Tensor& starts_BL) {
        const auto by_head = [&](const at::Tensor& taps) {
          return taps.reshape({x_BLgc.size(2), -1, taps.size(1)});
        };
        return convolved(x_BLgc, at::cat({by_head(q), by_head(k), by_head(w)}, 1), starts_BL,
                         kv_cache);
      },
      narrow(qkvz, 3, 0, 2 * d + values), use(conv_q_), use(conv_k_), use(conv_v_),
      tokens.document_starts());
  const Heads y = map_heads(
      [&](const at::Tensor& all_BLgc, const at::Tensor& ba_BLgr, const at::Tensor& a_log_h,
          const at::Tensor& dt_bias_h, const at::Tensor& starts_BL) {
        const auto wide = a_log_h.scalar_type();
        const at::Tensor beta = ba_BLgr.narrow(3, 0, group_).flatten(2, 3).to(wide).sigmoid(),
                         time = ba_BLgr.narrow(3, group_, group_).flatten(2, 3).to(wide),
                         decay = -a_log_h.exp() * at::softplus(time + dt_bias_h);
        at::Tensor y_BLhv;
        if (kv_cache) {
          auto out = kernels::delta_rule_forward(
              {all_BLgc, decay, beta, d, {}, kv_cache->carried().state}, chunk());
          kv_cache->carried().state = out.state_Bhdv, y_BLhv = out.y_BLhv;
        } else {
          y_BLhv = delta_rule(all_BLgc, decay, beta, starts_BL, d, chunk());
        }
        return y_BLhv.unflatten(2, {all_BLgc.size(2), group_});  // [B, L, g, r, v]
      },
      qkv, ba, use(a_log_), use(dt_bias_), tokens.document_starts());
  const Heads gates = unflatten(narrow(qkvz, 3, 2 * d + values, values), 3, {group_, v});
  const Heads gated = norm_.per_head(y) * silu(gates);
  return out_(flatten(gated, 2, 4), numbers);
}

void DeltaNet::each_param(const std::function<void(Stored&)>& f) {
  const auto visit = [&](auto& w) { f(w.stored()); };
  qkvz_.each_param(visit), ba_.each_param(visit);
  for (Cut* w : {&conv_q_, &conv_k_, &conv_v_, &a_log_, &dt_bias_}) visit(*w);
  norm_.each_param(visit), out_.each_param(visit);
}

double DeltaNet::flops(std::int64_t sequence) const {
  // A token takes part in scores and corrections of its chunk, and three products with the state.
  const auto C = static_cast<double>(std::min(chunk(), sequence)),
             d = static_cast<double>(config_.key_dim), v = static_cast<double>(config_.value_dim);
  const double forward = 4 * C * d + C * (d + v) + 2 * C * v + 6 * d * v;
  return 3 * static_cast<double>(config_.num_value_heads) * forward;
}

}  // namespace moesh::nn
