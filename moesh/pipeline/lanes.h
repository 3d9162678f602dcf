#pragma once
// Two pieces of work that take turns on a rank (base/turns.h), without tensors: how long they take
// together. While rows of one are on their way, the other one computes.

#include <vector>

namespace moesh::pipeline {

/// What rows travel on. Each carries one message after the other.
enum class RowLink { inside, between };  // a node, nodes

/// Computing, and then a message, which is awaited before the next step.
struct LaneStep {
  double compute = 0;
  double message = 0;  // how long it takes on its link; 0: none
  RowLink link = RowLink::between;
  bool takes_turns = true;  // while it is awaited, the other goes on
};
using Lane = std::vector<LaneStep>;

/// From the first step of lane 0, which begins, to the end of the last of all. Computing takes
/// `slower` of its time more while messages are on their way.
double seconds_in_turns(const std::vector<Lane>& lanes, double slower = 0);

/// The same one after the other.
double seconds_apart(const Lane& lane);

}  // namespace moesh::pipeline
