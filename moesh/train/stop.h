#pragma once
// Signals that end runs: SIGINT, SIGTERM, and SIGHUP of a terminal that is closed.

#include <functional>

namespace moesh::train {

/// While one lives, the first signal ends runs after their step. The same one within a second
/// counts as the first; after that it ends the process as usual. Runs at the same time, on threads
/// of an embedding program, all end; the last scope gives back the handlers that were there before
/// the first.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  /// Ends the scope before its destructor does. Where a signal has come it waits until all runs
  /// have ended and saved, and the last of them calls `deliver`, once for all: what a signal does
  /// to the process must not come before.
  void leave(const std::function<void(int signal)>& deliver);

 private:
  bool has_left_ = false;
};

/// The signal that has come since the first of the scopes that live; 0: none.
int stop_signal();

}  // namespace moesh::train
