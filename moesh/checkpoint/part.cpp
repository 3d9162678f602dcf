#include "moesh/checkpoint/part.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "moesh/base/error.h"

namespace moesh::checkpoint {
namespace {

// The only dimension along which b begins where a ends, all others being equal.
std::optional<std::size_t> neighbours(const Region& a, const Region& b) {
  std::optional<std::size_t> found;
  for (std::size_t d = 0; d < a.start.size(); ++d) {
    if (a.start[d] == b.start[d] && a.length[d] == b.length[d]) continue;
    if (found || a.start[d] + a.length[d] != b.start[d]) return std::nullopt;
    found = d;
  }
  return found;
}

}  // namespace

TensorPart part_of(const Stored& w) { return part_of(w, w.spec.name, w.value.detach()); }

TensorPart part_of(const Stored& w, const std::string& name, const at::Tensor& value) {
  return {.name = name,
          .shape = w.spec.shape,
          .region = w.shard,
          .owned = is_first_holder(w),
          .value = value};
}

TensorPart replicated_part(const std::string& name, const at::Tensor& value, int rank) {
  return {.name = name,
          .shape = value.sizes().vec(),
          .region = {Sizes(static_cast<std::size_t>(value.dim()), 0), value.sizes().vec()},
          .owned = rank == 0,
          .value = value};
}

std::int64_t num_elements(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

formats::Dtype disk_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return formats::Dtype::f32;
    case at::kDouble: return formats::Dtype::f64;
    case at::kBFloat16: return formats::Dtype::bf16;
    case at::kHalf: return formats::Dtype::f16;
    case at::kLong: return formats::Dtype::i64;
    default:
      throw Error(ErrorKind::internal, detail::concat("a checkpoint holds no ", dtype, " tensors"));
  }
}

at::ScalarType torch_dtype(formats::Dtype dtype, const std::string& what) {
  switch (dtype) {
    case formats::Dtype::f32: return at::kFloat;
    case formats::Dtype::f64: return at::kDouble;
    case formats::Dtype::bf16: return at::kBFloat16;
    case formats::Dtype::f16: return at::kHalf;
    case formats::Dtype::i64: return at::kLong;
    default:
      throw Error(
          ErrorKind::data,
          detail::concat(
              what, " is of type ", formats::name_of(dtype),
              ", which moesh does not read; it takes BF16, F16, F32 and F64. Weights in float8 "
              "must be converted to BF16 first, with their scales"));
  }
}

std::optional<Overlap> overlap_with(const formats::DiskTensor& tensor,
                                    const formats::Source& source, const Region& region) {
  MOESH_CHECK(source.dims.size() == region.start.size(), ErrorKind::internal, "disk table: '",
              source.param, "' has ", region.start.size(), " dimensions, and the table of tensor '",
              tensor.name, "' gives it ", source.dims.size());
  Overlap overlap{.param = region,
                  .view = {Sizes(tensor.view.size(), 0), Sizes(tensor.view.size(), 1)}};
  for (const auto& [dim, index] : source.fixed) overlap.view.start[dim] = index;
  for (std::size_t p = 0; p < source.dims.size(); ++p) {
    const auto v = source.dims[p];
    const std::int64_t first = std::max(region.start[p], source.offset[p]);
    const std::int64_t last =
        std::min(region.start[p] + region.length[p], source.offset[p] + tensor.view[v]);
    if (first >= last) return std::nullopt;
    overlap.param.start[p] = first, overlap.param.length[p] = last - first;
    overlap.view.start[v] = first - source.offset[p], overlap.view.length[v] = last - first;
  }
  return overlap;
}

at::Tensor in_view_order(const TensorPart& part, const formats::Source& source,
                         const Overlap& overlap) {
  at::Tensor t = part.value;
  std::vector<std::int64_t> order(source.dims.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t p = 0; p < order.size(); ++p)
    t = t.narrow(static_cast<std::int64_t>(p), overlap.param.start[p] - part.region.start[p],
                 overlap.param.length[p]);
  std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return source.dims[static_cast<std::size_t>(a)] < source.dims[static_cast<std::size_t>(b)];
  });
  t = t.permute(order);
  auto fixed = source.fixed;
  std::sort(fixed.begin(), fixed.end());
  for (const auto& [dim, index] : fixed) t = t.unsqueeze(static_cast<std::int64_t>(dim));
  return t;
}

void each_run(
    const Sizes& view, const Region& box,
    const std::function<void(std::int64_t in_view, std::int64_t in_box, std::int64_t length)>& f) {
  const std::int64_t size = num_elements(box.length);
  if (size == 0) return;
  // A run takes in one dimension more for each inner one that the box fills.
  std::size_t outer = view.size();
  std::int64_t run = 1;
  while (outer > 0) {
    --outer;
    run *= box.length[outer];
    if (box.length[outer] != view[outer]) break;
  }
  for (std::int64_t in_box = 0; in_box < size; in_box += run) {
    std::int64_t rest = in_box, stride = 1, in_view = 0;
    for (std::size_t d = view.size(); d-- > 0;) {
      in_view += (box.start[d] + rest % box.length[d]) * stride;
      rest /= box.length[d];
      stride *= view[d];
    }
    f(in_view, in_box, run);
  }
}

at::Tensor to_host(const at::Tensor& value) {
  if (value.is_cpu()) return value;
  at::Tensor host;
  try {
    host = at::empty(value.sizes(),
                     at::TensorOptions(at::kCPU).dtype(value.scalar_type()).pinned_memory(true));
  } catch (const c10::Error&) {
    return value.cpu();  // the system pins no more memory
  }
  host.copy_(value);
  return host;
}

std::vector<BoxWithValues> merged(std::vector<BoxWithValues> boxes) {
  for (bool again = true; again;) {
    again = false;
    for (std::size_t i = 0; i < boxes.size() && !again; ++i)
      for (std::size_t j = 0; j < boxes.size() && !again; ++j)
        if (const auto dim = i == j ? std::nullopt : neighbours(boxes[i].box, boxes[j].box)) {
          boxes[i].box.length[*dim] += boxes[j].box.length[*dim];
          boxes[i].value =
              at::cat({boxes[i].value, boxes[j].value}, static_cast<std::int64_t>(*dim));
          boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(j));
          again = true;
        }
  }
  return boxes;
}

}  // namespace moesh::checkpoint
