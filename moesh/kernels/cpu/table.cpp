// The table of the CPU, the threads that its kernels use, the vectors that this machine has, and
// small GEMMs.

#include <ATen/Context.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <array>
#include <exception>
#include <mutex>
#include <vector>

#include "moesh/kernels/cpu/operands.h"
#include "moesh/kernels/cpu/tasks.h"
#include "moesh/kernels/table.h"

namespace moesh::kernels::cpu {

void on_workers(std::int64_t num_workers, c10::function_ref<void(std::int64_t)> f) {
  if (num_workers <= 1) {
    if (num_workers == 1) f(0);
    return;
  }
  // An element-wise loop over one element per worker: the library's own way to its threads.
  at::Tensor one_each = at::empty({num_workers}, at::kByte);
  auto iterator = at::TensorIterator::nullary_op(one_each);
  std::atomic<std::int64_t> next{0};
  // Not left to the library: of 2.11 some builds lose what a worker throws.
  std::once_flag is_thrown;
  std::exception_ptr thrown;
  iterator.for_each(
      [&](char**, const std::int64_t*, std::int64_t size, std::int64_t count) {
        try {
          for (std::int64_t i = 0; i < size * count; ++i)
            f(next.fetch_add(1, std::memory_order_relaxed));
        } catch (...) {
          std::call_once(is_thrown, [&] { thrown = std::current_exception(); });
        }
      },
      /*grain_size=*/1);
  if (thrown) std::rethrow_exception(thrown);
}

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

namespace moesh::kernels {

namespace cpu {

// Each is in the file of its name or kind.
decltype(kernels::top_k) top_k;
SortKernel sort_by_expert;
decltype(kernels::rank_major_to_expert_major) rank_major_to_expert_major;
decltype(kernels::gather_rows) gather_rows;
decltype(kernels::combine_rows) combine_rows;
decltype(kernels::experts_forward) experts_forward;
decltype(kernels::experts_backward) experts_backward;
decltype(kernels::adamw_) adamw_;
SumOfSquaresKernel sum_of_squares;
decltype(kernels::attention_forward) attention_forward;
decltype(kernels::attention_backward) attention_backward;

}  // namespace cpu

const KernelTable& cpu_kernels() {
  static const KernelTable table = [] {
    KernelTable t = aten_kernels();
    t.name = "cpu";
    t.top_k = cpu::top_k;
    t.sort_by_expert = cpu::sort_by_expert;
    t.rank_major_to_expert_major = cpu::rank_major_to_expert_major;
    t.gather_rows = cpu::gather_rows;
    t.combine_rows = cpu::combine_rows;
    t.experts_forward = cpu::experts_forward;
    t.experts_backward = cpu::experts_backward;
    t.refuses_experts = plain_experts_only;
    t.adamw_ = cpu::adamw_;
    t.sum_of_squares = cpu::sum_of_squares;
    t.attention_forward = cpu::attention_forward;
    t.attention_backward = cpu::attention_backward;
    return t;
  }();
  return table;
}

}  // namespace moesh::kernels
