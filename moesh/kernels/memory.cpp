#include "moesh/kernels/memory.h"

#include <climits>
#include <cstdlib>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace moesh::kernels {

void keep_freed_memory() {
#if defined(__GLIBC__)
  mallopt(M_MMAP_MAX, 0);                // everything from the heap
  mallopt(M_TRIM_THRESHOLD, INT_MAX);    // which does not shrink
  mallopt(M_TOP_PAD, 64 * 1024 * 1024);  // and grows in large steps
#endif
}

}  // namespace moesh::kernels
