#include "moesh/spmd/ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
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
at::Tensor mul(const at::Tensor& a, const at::Tensor& b) { return at::mul(a, b); }
at::Tensor scale(const at::Tensor& x, double factor) { return at::mul(x, factor); }
at::Tensor scale(const at::Tensor& x, const at::Tensor& factor) {
  MOESH_CHECK(factor.numel() == 1, ErrorKind::config, "a tensor is scaled by ", factor.numel(),
              " numbers; pass one");
  return x * factor.detach().reshape({}).to(x.scalar_type());
}
at::Tensor silu(const at::Tensor& x) { return at::silu(x); }
at::Tensor square(const at::Tensor& x) { return at::square(x); }
at::Tensor sqrt(const at::Tensor& x) { return at::sqrt(x); }
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
at::Tensor sum(const at::Tensor& x, std::int64_t dim) { return at::sum(x, dim); }
at::Tensor sum_all(const at::Tensor& x) { return at::sum(x); }
at::Tensor one_hot(const at::Tensor& index, std::int64_t num_values) {
  auto shape = index.sizes().vec();
  shape.back() = num_values;
  return at::zeros(shape, index.options().dtype(at::kBool)).scatter(-1, index, true);
}
at::Tensor count(const at::Tensor& x, std::int64_t num_values) {
  // Not bincount, for whose answer the host waits for an accelerator. Whole numbers add up to the
  // same in any order; those of 32 bits have an addition of their own there.
  const at::Tensor one = at::ones({1}, x.options().dtype(at::kInt));
  return at::zeros({num_values}, one.options())
      .scatter_add_(0, x.flatten(), one.expand({x.numel()}))
      .to(at::kLong);
}
at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) { return x.to(dtype); }
at::Tensor flatten(const at::Tensor& x, std::int64_t first, std::int64_t last) {
  return x.flatten(first, last);
}
at::Tensor unflatten(const at::Tensor& x, std::int64_t dim, at::IntArrayRef sizes) {
  return x.unflatten(dim, sizes);
}
at::Tensor select(const at::Tensor& x, std::int64_t dim, std::int64_t index) {
  return x.select(dim, index);
}
at::Tensor narrow(const at::Tensor& x, std::int64_t dim, std::int64_t start, std::int64_t length) {
  return x.narrow(dim, start, length);
}
at::Tensor cat(const std::vector<at::Tensor>& parts, std::int64_t dim) {
  return at::cat(parts, dim);
}
at::Tensor stack(const std::vector<at::Tensor>& parts) { return at::stack(parts); }

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::optional<at::Tensor> optional_of(const at::Tensor& t) {
  return t.defined() ? std::optional(t) : std::nullopt;
}

class KnownLinear : public torch::autograd::Function<KnownLinear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& y,
                            const c10::intrusive_ptr<WeightSink>& sink,
                            const c10::intrusive_ptr<GradientSum>& sum, const OwnProducts& own) {
    const bool has_dw = w.requires_grad() || !sink->is_empty();  // else nobody asks for x again
    context->save_for_backward({has_dw ? x : at::Tensor(), w});
    if (own) context->saved_data["own"] = c10::IValue::make_capsule(own);
    if (sum) context->saved_data["sum"] = c10::IValue::make_capsule(sum);
    context->saved_data["has_bias"] = b.has_value();
    context->saved_data["sink"] = c10::IValue::make_capsule(sink);
    if (y) return y->detach();
    if (!own) return at::linear(x, w, b);
    const at::Tensor product = own->forward(x, w);
    return b ? product + *b : product;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto sink =
        c10::static_intrusive_pointer_cast<WeightSink>(context->saved_data["sink"].toCapsule());
    const auto saved = context->get_saved_variables();
    const at::Tensor rows = grads[0].flatten(0, -2);
    const auto kept = [&](const char* name) -> c10::intrusive_ptr<torch::CustomClassHolder> {
      const auto found = context->saved_data.find(name);
      if (found == context->saved_data.end()) return {};
      return found->second.toCapsule();
    };
    const auto sum = c10::static_intrusive_pointer_cast<GradientSum>(kept("sum"));
    const auto own = c10::static_intrusive_pointer_cast<LinearProducts>(kept("own"));
    at::Tensor dx;
    if (sum && !own)
      sum->add_product(rows, saved[1]);
    else if (sum || context->needs_input_grad(0))
      dx = (own ? own->backward(rows, saved[1]) : rows.mm(saved[1]))
               .unflatten(0, grads[0].sizes().slice(0, grads[0].dim() - 1));
    if (sum && own) sum->add(std::exchange(dx, {}));
    const at::Tensor db = context->saved_data["has_bias"].toBool() ? rows.sum(0) : at::Tensor();
    const bool has_dw = context->needs_input_grad(1);  // not of what is frozen, or left for later
    if (sink->is_empty() && !has_dw) return {dx, {}, db, {}, {}, {}, {}};
    const at::Tensor x = saved[0].detach().flatten(0, -2);
    if (sink->is_empty()) return {dx, rows.t().mm(x), db, {}, {}, {}, {}};
    sink->leave([sink, rows, x] { sink->give({rows.t().mm(x)}); });
    return {dx, {}, db, {}, {}, {}, {}};
  }
};

at::Tensor known_linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b,
                        const at::Tensor& y, const OwnProducts& own) {
  const auto sink = sink_for(x, {w});
  return KnownLinear::apply(x, sink->is_empty() ? w : w.detach(), optional_of(b), optional_of(y),
                            sink, sum_for(x), own);
}

bool needs_known_linear(const at::Tensor& x, const at::Tensor& w, const OwnProducts& own) {
  return own || later_of(w) || sum_for(x);
}

}  // namespace

at::Tensor known_linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y,
                        const OwnProducts& own) {
  return known_linear(x, w, {}, y, own);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const OwnProducts& own) {
  return needs_known_linear(x, w, own) ? known_linear(x, w, {}, own) : at::linear(x, w);
}
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b,
                  const OwnProducts& own) {
  return needs_known_linear(x, w, own) ? known_linear(x, w, b, {}, own) : at::linear(x, w, b);
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
