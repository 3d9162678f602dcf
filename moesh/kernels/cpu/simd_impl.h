// Included once by each simd_*.cpp, which defines MOESH_SIMD (a name for the instruction set) and is compiled with its flags.
// Everything here has internal linkage: a function that the linker could share between two instruction sets would crash
// older processors. For the same reason nothing is included that has inline functions of its own.

#include "moesh/kernels/cpu/simd_activate.h"
#include "moesh/kernels/cpu/simd_pack.h"
#include "moesh/kernels/cpu/simd_rows.h"

namespace moesh::kernels::cpu {
namespace {

template <class T>
constexpr SimdOps<T> make_ops() {
  SimdOps<T> ops{transpose<T>, pack<T>,        pack_transposed<T>, activate<T>, activate_backward<T>, add_rows<Accumulate<T>>,
                 put_rows<T>,  stream_rows<T>, combine<T>,         sum_rows<T>, dot_rows<T>,          nullptr};
  if constexpr (sizeof(T) == 8) ops.gemm = gemm;
  return ops;
}

}  // namespace

#define MOESH_SIMD_TEXT(x) #x
#define MOESH_SIMD_NAME(x) MOESH_SIMD_TEXT(x)
extern const SimdTable MOESH_SIMD;
const SimdTable MOESH_SIMD{MOESH_SIMD_NAME(MOESH_SIMD), make_ops<double>(), make_ops<float>(), make_ops<Bf16>()};

}  // namespace moesh::kernels::cpu
