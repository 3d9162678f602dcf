#define MOESH_SIMD simd_avx2
#include "moesh/kernels/cpu/simd_impl.h"
