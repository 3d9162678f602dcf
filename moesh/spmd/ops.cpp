#include "moesh/spmd/ops.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>

#include "moesh/spmd/dtype.h"

namespace moesh::raw {

at::Tensor linear(const at::Tensor& x, const at::Tensor& w) { return at::linear(x, w); }
at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }
at::Tensor sub(const at::Tensor& a, const at::Tensor& b) { return at::sub(a, b); }
at::Tensor mul(const at::Tensor& a, const at::Tensor& b) { return at::mul(a, b); }
at::Tensor scale(const at::Tensor& x, double factor) { return at::mul(x, factor); }
at::Tensor add_scalar(const at::Tensor& x, double value) { return at::add(x, value); }
at::Tensor silu(const at::Tensor& x) { return at::silu(x); }
at::Tensor square(const at::Tensor& x) { return at::square(x); }
at::Tensor softmax(const at::Tensor& x) { return at::softmax(x, -1); }
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& w, double eps) {
  const auto wide = wide_dtype(x.scalar_type());
  const at::Tensor y = x.to(wide);
  const at::Tensor normal = y * at::rsqrt(at::mean(at::square(y), {-1}, /*keepdim=*/true) + eps);
  return (w.defined() ? normal * w.to(wide) : normal).to(x.scalar_type());
}
at::Tensor sum(const at::Tensor& x, const std::vector<std::int64_t>& dims) {
  return dims.empty() ? at::sum(x) : at::sum(x, dims);
}
at::Tensor cast(const at::Tensor& x, at::ScalarType dtype) { return x.to(dtype); }
at::Tensor select(const at::Tensor& x, std::int64_t dim, std::int64_t index) {
  return x.select(dim, index);
}
at::Tensor narrow(const at::Tensor& x, std::int64_t dim, std::int64_t start, std::int64_t length) {
  return x.narrow(dim, start, length);
}
at::Tensor cat(const std::vector<at::Tensor>& parts, std::int64_t dim) {
  return at::cat(parts, dim);
}

}  // namespace moesh::raw
