#pragma once
// Two sets of tensors, of any framework, name by name: for people who debug the parallelism of
// their own system.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "moesh/verify/parity.h"

namespace moesh::verify {

struct CompareOptions {
  /// Relative error that is allowed; without one it follows the narrower of the two dtypes: 1e-10
  /// for float64, 1e-5 for float32, 2e-2 for 16 bits.
  std::optional<double> tolerance = {};
  /// (regular expression, replacement) pairs that turn a name of A into one of B, one after the
  /// other.
  std::vector<std::pair<std::string, std::string>> renames = {};
};

/// One name of A, or one that only B has.
struct ComparedTensor {
  enum class Verdict { same, differs, shape_differs, only_in_a, only_in_b };
  std::string name, other_name;  // in A and in B
  Verdict state = Verdict::same;
  std::vector<std::int64_t> shape, other_shape;
  double error = 0, allowed = 0;    // |a - b|, and what the tolerance allows
  double norm = 0, other_norm = 0;  // |a| and |b|
  double factor = 0;                // <a, b> / <b, b>
  double residue = 0;  // |a - factor * b| / |a|: near 0 where the factor is all that is wrong
  std::vector<std::int64_t> worst_index;  // of the element that is furthest off
  double worst_a = 0, worst_b = 0;
  bool is_finite = true;

  double relative() const;
  /// The meaning of the factor, if it has one: "a is 2 times b: ...".
  std::string diagnosis() const;
  /// All of it, as lines.
  std::string describe() const;
};

struct Comparison {
  // In the order of A's files if they have a chosen order, else in natural order (layers.2 before
  // layers.10); then what only B has.
  std::vector<ComparedTensor> tensors;
  bool same() const;
  const ComparedTensor* first_difference() const;
  /// The output of the command: the tensors that differ, or all of them, and how many are the same.
  std::string describe(bool all = false) const;
};

/// Tensors of any device, in the order in which they are computed where there is one.
using TensorList = std::vector<std::pair<std::string, at::Tensor>>;
/// A safetensors file, a folder of them, or what is in memory.
using Compared = std::variant<std::string, TensorList>;

/// b is the reference.
Comparison compare(const Compared& a, const Compared& b, const CompareOptions& options = {});

// Tensors as a safetensors file, for `moesh compare` and other readers.

void write_tensors(const std::string& path, const NamedTensors& tensors);

}  // namespace moesh::verify
