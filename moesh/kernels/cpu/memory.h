#pragma once
// Memory for large results.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moesh::kernels::cpu {

/// Asks for huge pages before the first touch. Fresh memory is zeroed by the kernel page by page, at every step again where it
/// is large: with pages of 4 KiB that was a sixth of the time of a layer.
inline at::Tensor on_huge_pages(at::Tensor t) {
#if defined(__linux__)
  constexpr std::uintptr_t kHugePage = 1 << 21;
  const auto begin = (reinterpret_cast<std::uintptr_t>(t.data_ptr()) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<std::uintptr_t>(t.data_ptr()) + t.nbytes()) / kHugePage * kHugePage;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: nothing depends on it
#endif
  return t;
}

inline at::Tensor large_empty(at::IntArrayRef sizes, const at::TensorOptions& options) { return on_huge_pages(at::empty(sizes, options)); }
inline at::Tensor large_empty_like(const at::Tensor& t) { return on_huge_pages(at::empty_like(t)); }

}  // namespace moesh::kernels::cpu
