#pragma once
// Memory for the results of collectives. The system hands out large blocks page by page, zeroed,
// and takes them back at once: for a result of some megabytes that costs as much as the copy into
// it, and more above 32 MiB. So large blocks are kept.

#include <ATen/core/Tensor.h>

namespace moesh::comm {

/// Like at::empty; large tensors on the host come from memory that was used before, where there is
/// some.
at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace moesh::comm
