#pragma once
// Runs the actions of one rank, from any list. It knows their order and which rank waits for which;
// what they compute and how messages travel is the actor's. No tensor is here.

#include <limits>

#include "moesh/pipeline/schedule.h"

namespace moesh::pipeline {

/// What one rank does. What two joined actions give is sent when both have ended. A message has no
/// name: those between two ranks arrive in the order in which they were sent, and both sides know
/// it from the schedule.
class Actor {
 public:
  virtual ~Actor() = default;
  /// Begins to receive, from a rank of pp, what `taker` will take: an activation for a forward, a
  /// gradient for a backward. It is not waited for.
  virtual void start_receive(const Action& taker, int from) = 0;
  /// Does the action, with what was received for it, or what a stage of this same rank has made.
  virtual void run(const Action& action) = 0;
  /// The same of two that are joined. By itself: one after the other.
  virtual void run_together(const Action& forward, const Action& backward) {
    run(forward);
    run(backward);
  }
  /// Begins to send what `maker` has made; and waits until that has gone, so that its memory is
  /// free.
  virtual void start_send(const Action& maker, int to) = 0;
  virtual void finish_send(const Action& maker) = 0;
};

struct ExecuteOptions {
  /// Messages of one kind (activations, or gradients) that may be under way to one rank, as in
  /// Costs: enough_buffers() says how many a schedule needs.
  int num_buffers = std::numeric_limits<int>::max();
};

/// All actions of a rank, in order. Before each one the receives of the next two messages that the
/// rank takes have been begun (of the next four before two that are joined), so that they travel
/// meanwhile; a send is waited for when its buffer is wanted, or at the end. Where there are
/// several ranks, an Error of an action says which one it was, of which rank of pp.
void execute(const Schedule& schedule, int rank, Actor& actor, const ExecuteOptions& options = {});

}  // namespace moesh::pipeline
