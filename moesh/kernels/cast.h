#pragma once
#include <ATen/core/Tensor.h>

namespace moesh::kernels {

/// Writes `from` into `to`, which has its shape, and is contiguous, on its device and of any dtype.
void cast_into(const at::Tensor& to, const at::Tensor& from);
/// x in another dtype; x itself if it has it.
at::Tensor cast(const at::Tensor& x, at::ScalarType dtype);

}  // namespace moesh::kernels
