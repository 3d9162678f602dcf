#pragma once
// Runs a schedule without tensors: when each action would begin and end, what the ranks hold, and
// whether they ever wait for each other in a circle. For any list of actions.

#include <limits>
#include <string>
#include <vector>

#include "moesh/pipeline/schedule.h"

namespace moesh::pipeline {

/// What the actions of a stage take, in any unit of time.
struct StageCosts {
  double forward = 1, backward_input = 1, backward_weight = 1;
  /// The parts of forward and of backward_input in which the rank waits for rows on the links. The
  /// two that are joined go beside each other: one computes in this time of the other.
  double forward_links = 0, backward_links = 0;
  double activation = 1;        // held from forward until backward has ended, in any unit of memory
  double kept_for_weights = 1;  // held from the gradients of inputs to those of weights
  /// While an action goes on, on top of what is held before.
  double in_forward = 0, in_backward = 0, in_weights = 0;
  double gradients = 0;  // held from the first gradients of weights to the end
  /// Time of what goes to the next stage, and of its gradient back, where that is on another rank.
  double transfer = 0;
};

struct Costs {
  std::vector<StageCosts> stages;  // one: all are alike
  /// Messages of one kind (activations, or gradients) that may lie between two ranks, from the
  /// start of the action that makes one to the start of that which takes it.
  int num_buffers = std::numeric_limits<int>::max();

  const StageCosts& of(int stage) const {
    return stages.size() == 1 ? stages[0] : stages[static_cast<size_t>(stage)];
  }
};

/// Two actions that are joined begin and end together.
struct Timed {
  Action action;
  double start, end;
};

struct Simulation {
  std::vector<std::vector<Timed>> ranks;
  double time = 0;           // from the first start to the last end, of all ranks
  std::vector<double> busy;  // time that each rank works
  std::vector<double> peak;  // of activations that each rank holds at once
  int num_buffers = 0;       // the most messages that lay between two ranks at once

  /// The part of `time` in which ranks wait: 1 - work / (ranks * time).
  double bubble_fraction() const;
};

/// The most that a rank holds at once which goes through these actions.
double most_held(const std::vector<Action>& actions, const Costs& costs, bool has_backward = true);

/// How long two joined actions take: as long as the rank computes for both, and waits for what the
/// compute of the other one does not hide of the rows of each.
double time_together(const Action& a, const Action& b, const Costs& costs);

/// Checks the schedule first. Throws Error (config) which names what each rank waits for where
/// they wait in a circle, or where two ranks do not exchange messages in one order.
Simulation simulate(const Schedule& schedule, const Costs& costs = {.stages = {{}}});

/// Buffers between two ranks, of each kind, with which no rank waits in a circle, whatever actions
/// take; and with which none waits for a buffer where all take the same time.
int enough_buffers(const Schedule& schedule);

// Two pieces of work that take turns on a rank (base/turns.h), without tensors: how long they take
// together. While rows of one are on their way, the other one computes.

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

// A simulated schedule as a picture.

/// A line for each rank, time from left to right, dots where it waits. An action is its letter and
/// its micro-batch ("F0 "; "F4.0 " with the stage, where ranks have several), and only the letter
/// where `columns` are too few for that. 0: as many as it takes.
std::string draw_text(const Simulation& simulation, int columns = 0);

/// A picture for browsers and pages, with its title, colours and numbers explained in it. The note
/// is under the title; empty: the bubble, and the most activations of a rank.
std::string draw_svg(const Simulation& simulation, const std::string& title,
                     const std::string& note = "");

}  // namespace moesh::pipeline
