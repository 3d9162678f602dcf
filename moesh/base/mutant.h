#pragma once
// Mistakes that can be switched on by name in a test build (-DMOESH_WITH_MUTANTS), each at the
// place where it would be made, to show that the checks find them. In every other build
// MOESH_MUTANT(x) is the constant false.

#ifdef MOESH_WITH_MUTANTS
#include <string>
namespace moesh {
/// The mistake that is on; empty: none. Set it before ranks start.
inline std::string& current_mutant() {
  static std::string name;
  return name;
}
}  // namespace moesh
#define MOESH_MUTANT(name) (::moesh::current_mutant() == #name)
#else
#define MOESH_MUTANT(name) false
#endif
