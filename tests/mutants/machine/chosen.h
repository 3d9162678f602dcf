#pragma once
// Which mistake of the machine is on. The copies of sources that mutate.py writes include this.

#include <atomic>
#include <type_traits>

namespace moesh::machine {

inline constexpr int kMost = 1 << 18;

inline int current = 0;  // 0: none
inline std::atomic<bool> reached[kMost];

inline bool chosen(int number) {
  reached[number].store(true, std::memory_order_relaxed);
  return number == current;
}

/// What the compiler evaluates has no mistakes: tables of types are mistaken at run time alone.
constexpr bool on(int number) { return !std::is_constant_evaluated() && chosen(number); }

}  // namespace moesh::machine
