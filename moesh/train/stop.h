#pragma once
// Signals that end runs: SIGINT, SIGTERM, and SIGHUP of a terminal that is closed.

#include <condition_variable>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "moesh/comm/observers.h"
#include "moesh/train/build.h"

namespace moesh::train {

/// While one lives, the first signal ends runs after their step. The same signal within a second
/// counts as the first; later it ends the process as usual. Concurrent runs, on threads of an
/// embedding program, all end; the last scope restores the handlers that were there before the
/// first.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  /// Ends the scope before its destructor does. After a signal it waits until all runs have ended
  /// and saved, and the last of them calls `deliver`, once for all: the effect of the signal on the
  /// process must not come before.
  void leave(const std::function<void(int signal)>& deliver);

 private:
  bool has_left_ = false;
};

/// For a program that only trains, as early as it likes, even before the libraries are initialized:
/// the first SignalScope begins here.
void catch_early_signals();

/// The signal that has come since the first of the scopes that live; 0: none.
int stop_signal();

// The report of a run that lost a rank: what each of the others was at, in words and in the
// run's folder, where the files of all ranks show which one was behind, and in what.

/// Watches the ranks of this process. A launcher that has lost a process sends the others a signal
/// to stop, and kills them a second or two later, long before a deadline. So a rank that gets the
/// signal and is still in the same wait a moment later reports what it waits for.
class LostRankReport {
 public:
  /// Within a SignalScope.
  explicit LostRankReport(const Config& config);
  ~LostRankReport();
  LostRankReport(const LostRankReport&) = delete;
  LostRankReport& operator=(const LostRankReport&) = delete;

  /// Called on the thread of a rank, before anything else.
  void add(int rank);
  /// The function of a rank has thrown.
  void threw(int rank, const std::exception_ptr& fault);

 private:
  void watch();
  void say_what_waits(int signal);
  void write(int rank, comm::flight::Recorder& recorder, const std::string& why);

  const Config& config_;
  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::map<int, std::shared_ptr<comm::flight::Recorder>> recorders_;  // that have said nothing yet
  bool is_ending_ = false;
  std::mutex writing_;
  std::thread thread_;  // where a launcher has started several processes
};

}  // namespace moesh::train
