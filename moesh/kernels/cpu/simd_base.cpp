#define MOESH_SIMD simd_base
#include "moesh/kernels/cpu/simd_impl.h"
