#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>

namespace moesh {

/// Counts the live bytes of CPU tensors, of all threads, and of each one those that it made. The
/// size of a block stands in front of it, and the thread that made it.
class CountingAllocator final : public c10::Allocator {
 public:
  /// Call it at the start of the program, before any tensor is made.
  static void install() {
    static CountingAllocator allocator;  // outlives every tensor
    c10::SetAllocator(c10::kCPU, &allocator, /*priority=*/1);
  }
  /// The peak counts from now on.
  static void reset_peak() { peak = live.load(); }

  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    auto* block = static_cast<char*>(c10::alloc_cpu(n + kFront));
    const Front front{static_cast<std::int64_t>(n), &of_this_thread()};
    std::memcpy(block, &front, sizeof(front));
    add(live, peak, front.size);
    add(front.maker->live, front.maker->peak, front.size);
    return {block + kFront, block + kFront, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  static inline std::atomic<std::int64_t> live{0}, peak{0};

  /// What one thread has made, whichever thread frees it.
  struct OfThread {
    std::atomic<std::int64_t> live{0}, peak{0};
    void reset_peak() { peak = live.load(); }
  };
  static OfThread& of_this_thread() {
    static std::deque<OfThread> all;  // blocks may outlive their thread
    static std::mutex mutex;
    thread_local OfThread* mine = nullptr;
    if (!mine) {
      const std::lock_guard lock(mutex);
      mine = &all.emplace_back();
    }
    return *mine;
  }

 private:
  struct Front {
    std::int64_t size;
    OfThread* maker;
  };
  static constexpr size_t kFront = 64;
  static void add(std::atomic<std::int64_t>& to, std::atomic<std::int64_t>& most, std::int64_t n) {
    to += n;
    for (std::int64_t seen = most; to > seen && !most.compare_exchange_weak(seen, to);) {
    }
  }
  static void release(void* p) {
    if (!p) return;
    char* block = static_cast<char*>(p) - kFront;
    Front front;
    std::memcpy(&front, block, sizeof(front));
    live -= front.size, front.maker->live -= front.size;
    c10::free_cpu(block);
  }
};

}  // namespace moesh
