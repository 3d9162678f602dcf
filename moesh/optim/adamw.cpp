#include "moesh/optim/adamw.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>

#include <cmath>

#include "moesh/base/error.h"

namespace moesh::optim {
namespace {

template <class V>
void loop(const raw::AdamWStep& s, std::int64_t n, V* w, const V* g, V* m, V* v) {
  const auto t = static_cast<double>(s.step);
  const auto keep = static_cast<V>(1 - s.lr * s.weight_decay);
  const auto beta1 = static_cast<V>(s.beta1), beta2 = static_cast<V>(s.beta2);
  const auto rest1 = static_cast<V>(1 - s.beta1), rest2 = static_cast<V>(1 - s.beta2);
  const auto rate = static_cast<V>(s.lr / (1 - std::pow(s.beta1, t)));
  const auto root = static_cast<V>(1 / std::sqrt(1 - std::pow(s.beta2, t)));
  const auto eps = static_cast<V>(s.eps);
  moesh::raw::in_parallel(n, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      m[i] = beta1 * m[i] + rest1 * g[i];
      v[i] = beta2 * v[i] + rest2 * g[i] * g[i];
      w[i] = keep * w[i] - rate * m[i] / (root * std::sqrt(v[i]) + eps);
    }
  });
}

}  // namespace

namespace raw {

void adamw_loop(const AdamWStep& s, const at::Tensor& w, const at::Tensor& g, const at::Tensor& m,
                const at::Tensor& v) {
  for (const auto& x : {w, g, m, v})
    MOESH_CHECK(x.is_cpu() && x.is_contiguous() && x.numel() == w.numel() &&
                    x.scalar_type() == w.scalar_type(),
                "AdamW's loop takes contiguous CPU tensors of one size and type");
  if (w.scalar_type() == at::kDouble)
    loop(s, w.numel(), w.data_ptr<double>(), g.const_data_ptr<double>(), m.data_ptr<double>(),
         v.data_ptr<double>());
  else
    loop(s, w.numel(), w.data_ptr<float>(), g.const_data_ptr<float>(), m.data_ptr<float>(),
         v.data_ptr<float>());
  w.unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
}

void adamw_fused(const AdamWStep& s, const std::vector<at::Tensor>& w,
                 const std::vector<at::Tensor>& g, const std::vector<at::Tensor>& m,
                 const std::vector<at::Tensor>& v) {
  if (w.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor step =
      at::full({}, static_cast<double>(s.step), w[0].options().dtype(at::kFloat));
  const std::vector<at::Tensor> steps(w.size(), step);
  at::_fused_adamw_(w, g, m, v, {}, steps, s.lr, s.beta1, s.beta2, s.weight_decay, s.eps,
                    /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace raw

void AdamWConfig::validate() const {
  const auto is_beta = [](double b) { return b >= 0 && b < 1; };
  MOESH_CHECK(is_beta(beta1), ErrorKind::config, "AdamW: beta1 is ", beta1,
              "; it takes 0 or more and less than 1, such as 0.9");
  MOESH_CHECK(is_beta(beta2), ErrorKind::config, "AdamW: beta2 is ", beta2,
              "; it takes 0 or more and less than 1, such as 0.95");
  MOESH_CHECK(std::isfinite(eps) && eps > 0, ErrorKind::config, "AdamW: eps is ", eps,
              "; it takes a positive number, such as 1e-8");
  MOESH_CHECK(std::isfinite(weight_decay) && weight_decay >= 0, ErrorKind::config,
              "AdamW: weight_decay is ", weight_decay, "; it takes 0 or more, such as 0.1");
}

AdamW::AdamW(const AdamWConfig& config) : config_(config) { config_.validate(); }

std::vector<StateSpec> AdamW::state(const Stored& /*w*/) const {
  return {{.name = "exp_avg"}, {.name = "exp_avg_sq"}};
}

void AdamW::update(const std::vector<Moving>& params, const RuleStep& step) const {
  for (const Decay decay : {Decay::on, Decay::off})
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const raw::AdamWStep s{.lr = step.lr,
                             .beta1 = config_.beta1,
                             .beta2 = config_.beta2,
                             .eps = config_.eps,
                             .weight_decay = decay == Decay::on ? config_.weight_decay : 0,
                             .step = step.number};
      std::vector<at::Tensor> w, g, m, v;  // what the loop does not take
      for (const auto& p : params) {
        if (p.decay != decay || p.value.scalar_type() != dtype) continue;
        if (p.value.is_cpu())
          raw::adamw_loop(s, p.value, p.gradient, p.state[0], p.state[1]);
        else
          w.push_back(p.value), g.push_back(p.gradient), m.push_back(p.state[0]),
              v.push_back(p.state[1]);
      }
      raw::adamw_fused(s, w, g, m, v);
    }
}

}  // namespace moesh::optim
