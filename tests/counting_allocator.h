#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace moesh {

/// Counts the live bytes of CPU tensors, of all threads. The size of a block stands in front of it.
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
    std::memcpy(block, &n, sizeof(n));
    live += static_cast<std::int64_t>(n);
    for (std::int64_t seen = peak; live > seen && !peak.compare_exchange_weak(seen, live);) {
    }
    return {block + kFront, block + kFront, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  static inline std::atomic<std::int64_t> live{0}, peak{0};

 private:
  static constexpr size_t kFront = 64;
  static void release(void* p) {
    if (!p) return;
    char* block = static_cast<char*>(p) - kFront;
    size_t n = 0;
    std::memcpy(&n, block, sizeof(n));
    live -= static_cast<std::int64_t>(n);
    c10::free_cpu(block);
  }
};

}  // namespace moesh
