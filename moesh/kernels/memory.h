#pragma once
#include <climits>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace moesh::kernels {

/// Makes the process keep the memory it frees (glibc; elsewhere it does nothing). By default large
/// tensors go back to the kernel, which zeroes their pages again at every step: a fifth of the time
/// of a layer with large weights. A program that trains on the CPU calls it once, at its start, as
/// `moesh train` does.
inline void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_MAX, 0);                // everything from the heap
  mallopt(M_TRIM_THRESHOLD, INT_MAX);    // which does not shrink
  mallopt(M_TOP_PAD, 64 * 1024 * 1024);  // and grows in large steps
#endif
}

}  // namespace moesh::kernels
