// Included once by each simd_*.cpp, which defines MOESH_SIMD (a name for the instruction set) and
// is compiled with its flags. Everything here has internal linkage: a function that the linker
// could share between two instruction sets would crash older processors. For the same reason
// nothing is included that has inline functions of its own.

#include "moesh/kernels/cpu/simd_activate.h"
#include "moesh/kernels/cpu/simd_pack.h"
#include "moesh/kernels/cpu/simd_rows.h"
#include "moesh/kernels/cpu/simd_softmax.h"

namespace moesh::kernels::cpu {
namespace {

template <class T>
constexpr SimdOps<T> make_ops() {
  SimdOps<T> ops{.transpose = transpose<T>,
                 .pack = pack<T>,
                 .pack_transposed = pack_transposed<T>,
                 .activate = activate<T>,
                 .activate_backward = activate_backward<T>,
                 .softmax = softmax<T>,
                 .softmax_backward = softmax_backward<T>,
                 .add_rows = add_rows<Accumulate<T>>,
                 .put_rows = put_rows<T>,
                 .stream_rows = stream_rows<T>,
                 .combine = combine<T>,
                 .sum_rows = sum_rows<T>,
                 .dot_rows = dot_rows<T>,
                 .gemm = nullptr};
  if constexpr (sizeof(T) == 8) ops.gemm = gemm;
  return ops;
}

}  // namespace

#define MOESH_SIMD_TEXT(x) #x
#define MOESH_SIMD_NAME(x) MOESH_SIMD_TEXT(x)
extern const SimdTable MOESH_SIMD;
const SimdTable MOESH_SIMD{MOESH_SIMD_NAME(MOESH_SIMD), make_ops<double>(), make_ops<float>(),
                           make_ops<Bf16>()};

}  // namespace moesh::kernels::cpu
