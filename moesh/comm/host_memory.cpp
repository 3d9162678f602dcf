// Memory for the results of collectives: large blocks are kept.
#include "moesh/comm/host_group.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <bit>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

namespace moesh::comm {
namespace {

constexpr std::size_t kMinBytes = 256 << 10;    // malloc serves smaller ones well
constexpr std::size_t kMaxIdleBytes = 1 << 30;  // of the process

struct Free {
  void operator()(void* data) const { std::free(data); }
};

struct Chunk {
  std::unique_ptr<void, Free> data;
  std::size_t bytes = 0;
  std::thread::id user;  // the thread that had it last
};

// Eight sizes to the power of two: shapes that change a little from step to step still find their
// memory again.
std::size_t rounded(std::size_t bytes) {
  const std::size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

class Pool final : public c10::Allocator {
 public:
  static Pool& instance() {
    static Pool& pool = *new Pool;  // tensors may outlive everything static
    return pool;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, at::kCPU};
    auto chunk = std::make_unique<Chunk>(take(rounded(bytes)));
    void* data = chunk->data.get();
    return {data, chunk.release(), give_back, at::kCPU};
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  Chunk take(std::size_t bytes) {
    const auto me = std::this_thread::get_id();
    {
      std::lock_guard lock(mutex_);
      auto found = idle_.end();
      for (auto it = idle_.begin(); it != idle_.end();
           ++it) {  // rather one that may still be in this core's cache
        if (it->bytes != bytes) continue;
        found = it;
        if (it->user == me) break;
      }
      if (found != idle_.end()) {
        Chunk chunk = std::move(*found);
        idle_.erase(found);
        idle_bytes_ -= bytes;
        chunk.user = me;
        return chunk;
      }
    }
    Chunk fresh{std::unique_ptr<void, Free>(std::aligned_alloc(64, bytes)), bytes, me};
    if (!fresh.data) throw std::bad_alloc();
    return fresh;
  }

  static void give_back(void* context) {
    const std::unique_ptr<Chunk> chunk(static_cast<Chunk*>(context));
    Pool& pool = instance();
    std::deque<Chunk> too_many;  // freed after the lock
    std::lock_guard lock(pool.mutex_);
    pool.idle_bytes_ += chunk->bytes;
    pool.idle_.push_back(std::move(*chunk));
    while (pool.idle_bytes_ > kMaxIdleBytes) {
      pool.idle_bytes_ -= pool.idle_.front().bytes;
      too_many.push_back(std::move(pool.idle_.front()));
      pool.idle_.pop_front();
    }
  }

  std::mutex mutex_;
  std::deque<Chunk> idle_;  // the oldest first
  std::size_t idle_bytes_ = 0;
};

}  // namespace

at::Tensor empty_result(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::size_t bytes = options.dtype().itemsize();
  for (auto s : sizes) bytes *= static_cast<std::size_t>(s);
  if (!options.device().is_cpu() || bytes < kMinBytes) return at::empty(sizes, options);
  return at::detail::empty_generic(sizes, &Pool::instance(),
                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   c10::typeMetaToScalarType(options.dtype()), std::nullopt);
}

}  // namespace moesh::comm
