#include "moesh/spmd/ops.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "moesh/base/error.h"
#include "moesh/spmd/linear.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::raw {

at::Tensor linear(const at::Tensor& x, const at::Tensor& w) {
  return are_weights_later() ? known_linear(x, w, {}) : at::linear(x, w);
}
at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
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

}  // namespace moesh::raw
