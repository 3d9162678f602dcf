#include <ATen/ops/from_blob.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/comm/host_group.h"

namespace moesh::comm {
namespace {

constexpr std::int64_t kChunk = 2048;  // accumulators of one chunk stay in the first-level cache

struct AddTerms {
  template <class A>
  static A apply(A a, A b) {
    // Sums of checksums wrap around, which only unsigned numbers may.
    if constexpr (std::is_signed_v<A> && std::is_integral_v<A>)
      return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) +
                            static_cast<std::make_unsigned_t<A>>(b));
    else
      return a + b;
  }
};
struct Max {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_floating_point_v<A>)
      return (a > b || a != a) ? a : b;
    else
      return a > b ? a : b;
  }
};
struct Min {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_floating_point_v<A>)
      return (a < b || a != a) ? a : b;
    else
      return a < b ? a : b;
  }
};

template <class V, class A, class O>
void fold_typed(const std::vector<Span>& spans, Span out) {
  A acc[kChunk];
  auto* to = static_cast<V*>(out.data);
  for (std::int64_t begin = 0; begin < out.numel; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, out.numel - begin);
    const auto* first = static_cast<const V*>(spans[0].data) + begin;
    for (std::int64_t i = 0; i < n; ++i) acc[i] = static_cast<A>(first[i]);
    for (size_t b = 1; b < spans.size(); ++b) {
      const auto* from = static_cast<const V*>(spans[b].data) + begin;
      for (std::int64_t i = 0; i < n; ++i) acc[i] = O::apply(acc[i], static_cast<A>(from[i]));
    }
    for (std::int64_t i = 0; i < n; ++i) to[begin + i] = static_cast<V>(acc[i]);
  }
}

template <class V, class A = V>
void fold_op(ReduceOp op, const std::vector<Span>& spans, Span out) {
  switch (op) {
    case ReduceOp::sum:
      if constexpr (std::is_same_v<V, bool>)
        throw Error(ErrorKind::internal, "a sum of bool reached fold");
      else
        return fold_typed<V, A, AddTerms>(spans, out);
    case ReduceOp::max: return fold_typed<V, A, Max>(spans, out);
    case ReduceOp::min: return fold_typed<V, A, Min>(spans, out);
  }
}

at::Tensor view(Span b, const at::TensorOptions& options) {
  return at::from_blob(b.data, {b.numel}, options);
}

// The same order of sums with ATen's kernels, for spans on an accelerator.
void fold_on_device(ReduceOp op, const std::vector<Span>& spans, Span out,
                    const at::TensorOptions& options) {
  const auto dtype = options.dtype().toScalarType();
  const auto wide = dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor acc = view(spans[0], options).to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (size_t b = 1; b < spans.size(); ++b) {
    const at::Tensor next = view(spans[b], options).to(wide);
    if (op == ReduceOp::sum)
      acc.add_(next);
    else
      acc = op == ReduceOp::max ? acc.maximum(next) : acc.minimum(next);
  }
  view(out, options).copy_(acc);
}

}  // namespace

void fold(ReduceOp op, const std::vector<Span>& spans, Span out, const at::TensorOptions& options) {
  if (out.numel == 0) return;
  if (!options.device().is_cpu()) return fold_on_device(op, spans, out, options);
  switch (options.dtype().toScalarType()) {
    case at::kDouble: return fold_op<double>(op, spans, out);
    case at::kFloat: return fold_op<float>(op, spans, out);
    case at::kBFloat16: return fold_op<c10::BFloat16, float>(op, spans, out);
    case at::kLong: return fold_op<std::int64_t>(op, spans, out);
    case at::kInt: return fold_op<std::int32_t>(op, spans, out);
    case at::kBool: return fold_op<bool>(op, spans, out);
    default: throw Error(ErrorKind::internal, "fold of an unsupported dtype");
  }
}

void copy(Span to, Span from, const at::TensorOptions& options) {
  if (from.numel == 0 || to.data == from.data) return;
  if (options.device().is_cpu()) {
    std::memcpy(to.data, from.data, static_cast<size_t>(from.numel) * options.dtype().itemsize());
  } else {
    view(to, options).copy_(view(from, options));
  }
}

}  // namespace moesh::comm
