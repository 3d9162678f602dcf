#include "moesh/kernels/cpu/operands.h"

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>

#include <array>

namespace moesh::kernels::cpu {
namespace {

using at::native::cpublas::brgemm;

bool try_pairs() {
  std::array<c10::BFloat16, 4> a{}, b{};
  std::array<float, 4> c{};
  try {
    brgemm(2, 2, 2, 2, 2, 2, false, a.data(), b.data(), c.data(), /*is_vnni=*/true);
    at::native::cpublas::brgemm_release(true);
    return true;
  } catch (const c10::Error&) {
    return false;  // not an x86 processor with AVX-512
  }
}

void call(std::int64_t m, std::int64_t n, std::int64_t k, const float* a, std::int64_t lda,
          const float* b, std::int64_t ldb, float* c, std::int64_t ldc, bool add) {
  brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, false);
}

void call(std::int64_t m, std::int64_t n, std::int64_t k, const Bf16* a, std::int64_t lda,
          const Bf16* b, std::int64_t ldb, float* c, std::int64_t ldc, bool add) {
  brgemm(m, n, k, lda, ldb, ldc, add, reinterpret_cast<const c10::BFloat16*>(a),
         reinterpret_cast<const c10::BFloat16*>(b), c, gemm_wants_pairs());
}

}  // namespace

bool gemm_wants_pairs() {
  static const bool can = try_pairs();
  return can && at::globalContext().userEnabledMkldnn();
}

template <class T>
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, const T* a, std::int64_t lda, const T* b,
          std::int64_t ldb, Accumulate<T>* c, std::int64_t ldc, bool add) {
  for (std::int64_t size = 128; m > 0;) {
    while (size > 8 && size > m) size /= 2;
    const std::int64_t rows = m < 8 ? m : size;
    call(rows, n, k, a, lda, b, ldb, c, ldc, add);
    a += rows * lda, c += rows * ldc, m -= rows;
  }
}
template void gemm(std::int64_t, std::int64_t, std::int64_t, const float*, std::int64_t,
                   const float*, std::int64_t, float*, std::int64_t, bool);
template void gemm(std::int64_t, std::int64_t, std::int64_t, const Bf16*, std::int64_t, const Bf16*,
                   std::int64_t, float*, std::int64_t, bool);

template <>
void gemm(std::int64_t m, std::int64_t n, std::int64_t k, const double* a, std::int64_t lda,
          const double* b, std::int64_t ldb, double* c, std::int64_t ldc, bool add) {
  simd_ops<double>().gemm(m, n, k, a, lda, b, ldb, c, ldc, add);
}

void gemm_done() {
  if (gemm_wants_pairs()) at::native::cpublas::brgemm_release(true);
}

}  // namespace moesh::kernels::cpu
