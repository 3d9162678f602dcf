#include "moesh/kernels/cpu/tasks.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <mutex>

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

}  // namespace moesh::kernels::cpu
