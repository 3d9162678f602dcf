#include "moesh/spmd/ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/spmd/attach.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::raw {

at::Tensor plus_product(const at::Tensor& w, const at::Tensor& b, const at::Tensor& a,
                        double factor) {
  return at::addmm(w, b, a, /*beta=*/1, factor);
}
at::Tensor add(const at::Tensor& a, const at::Tensor& b) {
  if (!is_not_computed(a) && !is_not_computed(b)) return at::add(a, b);
  const at::Tensor sum = not_computed(a.sizes(), is_not_computed(a) ? a : b);
  Tensors terms;
  for (const auto& term : {a, b})
    if (at::GradMode::is_enabled() && term.requires_grad()) terms.push_back(term);
  if (terms.empty()) return sum;
  return attach_many(terms, {sum},
                     [n = terms.size()](const Tensors& grads) { return Tensors(n, grads[0]); })[0];
}
at::Tensor scale(const at::Tensor& x, const at::Tensor& factor) {
  MOESH_CHECK(factor.numel() == 1, ErrorKind::config, "a tensor is scaled by ", factor.numel(),
              " numbers; pass one");
  return x * factor.detach().reshape({}).to(x.scalar_type());
}
std::int64_t dim_of(Over over, const at::Tensor& x) {
  const bool are_experts = over == Over::experts;
  const std::int64_t dim = over == Over::features ? 1 : 0;
  MOESH_CHECK(dim < x.dim() && (are_experts || x.dim() <= 2), ErrorKind::config, "a sum over ",
              are_experts            ? "experts"
              : over == Over::tokens ? "tokens"
                                     : "features",
              " of a tensor ", x.sizes(), "; it takes ",
              are_experts            ? "[E, ..]"
              : over == Over::tokens ? "[N] or [N, D]"
                                     : "[N, D]",
              ": flatten(x, first, last) the dimensions that belong together");
  return dim;
}
at::Tensor one_hot(const at::Tensor& index, std::int64_t num_values) {
  auto shape = index.sizes().vec();
  shape.back() = num_values;
  return at::zeros(shape, index.options().dtype(at::kBool)).scatter(-1, index, true);
}

at::Tensor known_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& b,
                        const at::Tensor& y, const OwnProducts& own) {
  const auto sink = sink_for(x, {weight});
  const auto sum = sum_for(x);
  const at::Tensor w = sink->is_empty() ? weight : weight.detach();
  const bool has_dx = x.requires_grad(), has_dw = w.requires_grad();  // not of what is frozen
  const auto forward = [&] {
    if (y.defined()) return y.detach();
    if (!own) return b.defined() ? at::linear(x, w, b) : at::linear(x, w);
    const at::Tensor product = own->forward(x, w);
    return b.defined() ? product + b : product;
  };
  const auto backward = [sink, sum, own, has_dx, has_dw, has_bias = b.defined()](
                            const Tensors& saved, const Tensors& dy) -> Tensors {
    const at::Tensor rows = dy[0].flatten(0, -2);
    at::Tensor dx;
    if (sum && !own)
      sum->add_product(rows, saved[1]);
    else if (sum || has_dx)
      dx = (own ? own->backward(rows, saved[1]) : rows.mm(saved[1]))
               .unflatten(0, dy[0].sizes().slice(0, dy[0].dim() - 1));
    if (sum && own) sum->add(std::exchange(dx, {}));
    const at::Tensor db = has_bias ? rows.sum(0) : at::Tensor();
    if (sink->is_empty() && !has_dw) return {dx, {}, db};
    const at::Tensor x = saved[0].detach().flatten(0, -2);
    if (sink->is_empty()) return {dx, rows.t().mm(x), db};
    sink->leave([sink, rows, x] { sink->give({rows.t().mm(x)}); });
    return {dx, {}, db};
  };
  return differentiable({x, w, b}, [&]() -> Differentiable {
    const bool asks_for_x = has_dw || !sink->is_empty();
    return {{forward()}, {asks_for_x ? x : at::Tensor(), w}, backward};
  })[0];
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b,
                  const OwnProducts& own) {
  if (own || later_of(w) || sum_for(x)) return known_linear(x, w, b, {}, own);
  return b.defined() ? at::linear(x, w, b) : at::linear(x, w);
}

at::Tensor check_rows(const at::Tensor& x, at::Tensor y, std::int64_t num_dims, const char* what) {
  MOESH_CHECK(x.dim() >= num_dims && y.dim() >= num_dims &&
                  x.sizes().slice(0, static_cast<size_t>(num_dims)) ==
                      y.sizes().slice(0, static_cast<size_t>(num_dims)),
              what, " made ", y.sizes(), " of ", x.sizes(), ": the first ", num_dims,
              " dimensions number the rows, and a function of rows leaves them as they are");
  return y;
}

at::Tensor map_linear(const at::Tensor& x,
                      const std::function<at::Tensor(const at::Tensor&)>& forward,
                      std::function<at::Tensor(const at::Tensor&)> adjoint) {
  return attach(x, forward(x.detach()), std::move(adjoint));
}

double number(const at::Tensor& x) {
  MOESH_CHECK(x.numel() == 1, ErrorKind::config, "a number is read from a tensor with ", x.numel(),
              " elements; sum it first");
  return x.item<double>();
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  MOESH_CHECK(max_norm > 0, ErrorKind::config, "the gradient norm is clipped at ", max_norm,
              "; it takes a positive number");
  const at::NoGradGuard no_grad;
  return norm.clamp_min(1e-300).reciprocal().mul_(max_norm).clamp_max_(1);
}

}  // namespace moesh::raw
