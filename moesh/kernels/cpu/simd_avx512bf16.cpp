#define MOESH_SIMD simd_avx512bf16
#include "moesh/kernels/cpu/simd_impl.h"
