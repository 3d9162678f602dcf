#include "moesh/kernels/cpu/simd.h"

namespace moesh::kernels::cpu {

extern const SimdTable simd_base;
#if defined(__x86_64__)
extern const SimdTable simd_avx2;
extern const SimdTable simd_avx512;
extern const SimdTable simd_avx512bf16;

const SimdTable& simd_table() {
  static const SimdTable* const table = [] {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
      return __builtin_cpu_supports("avx512bf16") ? &simd_avx512bf16 : &simd_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &simd_avx2;
    return &simd_base;
  }();
  return *table;
}
#else
const SimdTable& simd_table() { return simd_base; }
#endif

}  // namespace moesh::kernels::cpu
