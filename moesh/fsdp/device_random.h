#pragma once
// The numbers of moesh/base/random.h by LibTorch's operations, so that a device makes its own.

#include <ATen/core/Tensor.h>

#include <vector>

#include "moesh/base/random.h"
#include "moesh/fsdp/param.h"

namespace moesh::raw {

/// random.uniform(i) and random.normal(i) for each i of index (int64), in float64. The first has
/// the same bits as on the host, the second is within a few roundings of float64.
at::Tensor uniforms(const Random& random, const at::Tensor& index);
at::Tensor normals(const Random& random, const at::Tensor& index);

/// Fills `out`, the box of a tensor of this shape that begins at `start`, with the initial values
/// of its indices in the whole. `chunk` elements at a time (an even number): 64 MiB for each step
/// of the way.
void fill_on_device(const at::Tensor& out, const std::vector<std::int64_t>& shape,
                    const std::vector<std::int64_t>& start, const Init& init, const Random& random,
                    std::int64_t chunk = 1 << 23);

}  // namespace moesh::raw
