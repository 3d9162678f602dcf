#include "moesh/spmd/ops.h"

#include <ATen/ops/add.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

namespace moesh::raw {

at::Tensor linear(const at::Tensor& x, const at::Tensor& w) { return at::linear(x, w); }
at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor mul(const at::Tensor& a, const at::Tensor& b) { return at::mul(a, b); }
at::Tensor scale(const at::Tensor& x, double factor) { return at::mul(x, factor); }
at::Tensor silu(const at::Tensor& x) { return at::silu(x); }
at::Tensor square(const at::Tensor& x) { return at::square(x); }
at::Tensor sqrt(const at::Tensor& x) { return at::sqrt(x); }
at::Tensor sum(const at::Tensor& x, const std::vector<std::int64_t>& dims) {
  return dims.empty() ? at::sum(x) : at::sum(x, dims);
}
at::Tensor count(const at::Tensor& x, std::int64_t num_values) {
  const at::Tensor flat = x.flatten();
  if (flat.is_cpu()) return at::bincount(flat, {}, num_values);
  // bincount waits for an accelerator, to look for the largest value.
  return at::zeros({num_values}, flat.options()).scatter_add_(0, flat, at::ones_like(flat));
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
