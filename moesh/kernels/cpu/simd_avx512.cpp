#define MOESH_SIMD simd_avx512
#include "moesh/kernels/cpu/simd_impl.h"
