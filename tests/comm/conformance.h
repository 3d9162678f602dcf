#pragma once
// One suite that every backend passes. A case is a function over a world group, called by every
// rank; it throws at the first thing that is not as it should be. Expected values come from plain
// loops over a formula of (rank, index).

#include <cstdint>
#include <vector>

#include "moesh/comm/group.h"

namespace moesh::comm::conformance {

/// What a backend promises, and where its tensors live.
struct Setup {
  at::Device device = at::kCPU;
  bool exact_sums = true;  // float sums have the bits of a plain sum in rank order
  bool nan_wins = true;    // max and min of a NaN are NaN
  bool checked = false;    // each start waits for the other ranks, to compare
  bool any_order = false;  // ranks may start operations of two groups in different orders
};

struct Case {
  const char* name;
  void (*run)(Group& world, const Setup& setup);
};

/// All cases. They hold for any number of ranks, and for `checked` around any group.
const std::vector<Case>& cases();

/// Those of messages between two ranks.
const std::vector<Case>& message_cases();

/// A hash over the results of many random collectives; the same on every rank. Equal digests mean
/// equal bits.
std::uint64_t digest(Group& world, const Setup& setup, std::uint64_t seed);

}  // namespace moesh::comm::conformance
