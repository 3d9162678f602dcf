#pragma once
// Small GEMMs on one thread, for blocks that are already packed: oneDNN's microkernels, which ATen
// exports.

#include "moesh/kernels/cpu/simd.h"

namespace moesh::kernels::cpu {

/// Whether B operands of bfloat16 interleave their rows in pairs here. If so, k must be even (pad a
/// and b with zeros).
bool gemm_wants_pairs();

/// c [m, n] = a [m, k] b [k, n], or += if `add`; b as SimdOps::pack leaves it. Row-major, strides
/// lda, ldb, ldc. The library makes machine code for each new size, once per thread: m may be
/// anything (it is divided into pieces of few sizes), n and k should come from a small set.
template <class T>
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, const T* a, std::int64_t lda, const T* b,
          std::int64_t ldb, Accumulate<T>* c, std::int64_t ldc, bool add);

/// Gives the matrix unit back, if the library holds one for this thread.
void gemm_done();

}  // namespace moesh::kernels::cpu
