#pragma once
// Which mistake is on. The copies of sources that hold mistakes include this (mutants.py writes
// them), and so do their tests.

#include <cstdint>
#include <string_view>

namespace moesh::mutants {

/// A name as a number (FNV-1a): a mistake may lie in a loop.
constexpr std::uint64_t number_of(std::string_view name) {
  std::uint64_t n = 0xcbf29ce484222325;
  for (const char c : name) n = (n ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return n;
}

struct Name {
  consteval Name(const char* name) : number(number_of(name)) {}
  std::uint64_t number;
};

inline std::uint64_t current = 0;  // 0: none. Set it before ranks start.

inline bool on(Name mutant) { return mutant.number == current; }

}  // namespace moesh::mutants
