#pragma once
// The cases of the sweep: every mesh of up to N ranks, every combination of options, or a selection
// in which every mesh comes at least once and every pair of options too.

#include <set>
#include <string>
#include <vector>

#include "tests/nn/layer_parity.h"

namespace moesh::sweep {

/// One choice for each option of the sweep.
struct Choice {
  int sequence_parallel, side, dispatcher, shared, batch, length, variant;
  static constexpr int kLevels[] = {2, 2, 4, 2, 2, 3, 4};
  std::vector<int> levels() const {
    return {sequence_parallel, side, dispatcher, shared, batch, length, variant};
  }
};

/// The choice with this number, 0 .. num_choices() - 1.
Choice choice(int number);
int num_choices();

/// The case for a mesh: E = 2 ep (at least 4), F = 2 etp (2 etp + 1 in one variant), L even, odd,
/// or smaller than tp.
verify::LayerCase make_case(const Choice& choice, const MeshShape& shape, at::ScalarType dtype,
                            at::Device device);

struct Totals {
  int num_meshes = 0, num_cases = 0, num_failed = 0;
  std::int64_t num_flipped = 0;
  double largest_margin = 0;
  std::vector<std::string> failures;  // texts, the first few
  std::set<std::string> pairs;        // pairs of options that ran
};

/// Runs choices on one mesh.
void run_mesh(const MeshShape& shape, const std::vector<Choice>& choices, at::ScalarType dtype,
              const comm::LaunchOptions& options, Totals& totals);

/// `per_mesh` choices for the mesh with this number: different ones for every mesh.
std::vector<Choice> select(int mesh_number, int per_mesh);

/// Every combination of the options; `automatic` is left out, it is one of the other dispatchers.
std::vector<Choice> every_choice();

/// How many pairs of options exist.
size_t num_pairs();

}  // namespace moesh::sweep
