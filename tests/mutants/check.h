#pragma once
// What must find mistakes. An entry (tests/mutants/*/*.mutants) names a check, its settings and
// what it says; the tests of each folder provide the checks, and tests/mutants/mutants_test.cpp
// runs each of them without the mistake and with it.

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "moesh/comm/mesh.h"

namespace moesh::mutants {

/// The mistake is on while this lives. Throws when no entry has the name.
class Switched {
 public:
  explicit Switched(std::string_view name);
  ~Switched();
  Switched(const Switched&) = delete;
  Switched& operator=(const Switched&) = delete;
};

/// "tp=2 ep=2 biases": numbers by name, 1 where none is given. A check takes those that it knows.
class Settings {
 public:
  explicit Settings(const std::string& text);
  double take(const std::string& name, double missing = 0);
  /// The sizes of the axes that are named.
  MeshShape take_mesh();
  /// Those that nobody took.
  std::string rest() const;

 private:
  std::map<std::string, double> values_;
};

/// Looks once, and returns what it says about the first thing that is wrong: empty where all is
/// well. What it compares with was made before, without a mistake.
using Check = std::function<std::string()>;

/// A check that entries can name; a global of the file that provides it.
struct Provide {
  Provide(const std::string& name, Check (*make)(Settings&));
};

}  // namespace moesh::mutants
