#include "moesh/kernels/cpu/simd.h"

#include <vector>

namespace moesh::kernels::cpu {

extern const SimdTable simd_base;
#if defined(__x86_64__)
extern const SimdTable simd_avx2;
extern const SimdTable simd_avx512;
extern const SimdTable simd_avx512bf16;
#endif

namespace {

std::vector<const SimdTable*> find_tables() {
  std::vector<const SimdTable*> tables;
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) tables.push_back(&simd_avx512bf16);
  if (avx512) tables.push_back(&simd_avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&simd_avx2);
#endif
  tables.push_back(&simd_base);
  return tables;
}

const std::vector<const SimdTable*>& tables() {
  static const std::vector<const SimdTable*> found = find_tables();
  return found;
}

}  // namespace

int num_simd_tables() { return static_cast<int>(tables().size()); }
const SimdTable& simd_table(int i) { return *tables().at(i); }

}  // namespace moesh::kernels::cpu
