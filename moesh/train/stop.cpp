#include "moesh/train/stop.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/rank_status.h"

namespace moesh::train {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
// Shells, launchers and `timeout` pass on what whole groups of processes have got already.
constexpr Clock::duration kSameSignal = std::chrono::seconds(1);

std::atomic<int> received{0};
std::array<std::atomic<Clock::rep>, kSignals.size()> came_at{};  // the first of each kind; 0: none
std::atomic<bool> is_early{false};                               // caught before any scope

using Actions = std::array<struct sigaction, kSignals.size()>;

struct Scopes {
  std::mutex mutex;
  std::condition_variable all_left;
  int num = 0;
  std::uint64_t num_rounds = 0;             // how often the last one has left
  std::function<void(int signal)> deliver;  // of the first that was left with one
  Actions before = {};
};
Scopes scopes;

void on_signal(int signal) {
  const Clock::rep now = Clock::now().time_since_epoch().count();
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    if (kSignals[i] != signal) continue;
    Clock::rep first = 0;
    if (came_at[i].compare_exchange_strong(first, now)) {
      received = signal;
    } else if (now - first >= kSameSignal.count()) {
      std::signal(signal, SIG_DFL);
      std::raise(signal);  // it ends the process when this returns
    }
  }
}

// Catches them all; `before` gets what else was there.
void catch_signals(Actions& before) {
  struct sigaction action = {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = on_signal;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction found = {};
    sigaction(kSignals[i], &action, &found);
    if ((found.sa_flags & SA_SIGINFO) != 0 || found.sa_handler != on_signal) before[i] = found;
    if (kSignals[i] == SIGHUP && found.sa_handler == SIG_IGN)  // nohup
      sigaction(SIGHUP, &found, nullptr);
  }
}

bool is_default(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

// With the lock. What has come may come again while the process ends: where it would end it as
// usual, and no thread delivers it, the handler stays, which does so after a second.
void end_round() {
  const auto deliver = std::exchange(scopes.deliver, {});
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    if (came_at[i] == 0 || deliver || !is_default(scopes.before[i]))
      sigaction(kSignals[i], &scopes.before[i], nullptr);
  ++scopes.num_rounds;
  if (const int signal = received; signal != 0 && deliver) deliver(signal);
  scopes.all_left.notify_all();
}

}  // namespace

int stop_signal() { return received; }

void catch_early_signals() {
  is_early = true;
  Actions before;  // not in `scopes`, which is not initialized then
  catch_signals(before);
}

SignalScope::SignalScope() {
  const std::lock_guard lock(scopes.mutex);
  if (scopes.num++ > 0) return;
  if (!is_early.exchange(false)) {
    received = 0;
    for (auto& came : came_at) came = 0;
  }
  catch_signals(scopes.before);
}

void SignalScope::leave(const std::function<void(int signal)>& deliver) {
  if (std::exchange(has_left_, true)) return;
  std::unique_lock lock(scopes.mutex);
  if (!scopes.deliver) scopes.deliver = deliver;
  if (--scopes.num == 0) return end_round();
  if (received == 0 || !deliver) return;
  scopes.all_left.wait(lock, [round = scopes.num_rounds] { return scopes.num_rounds != round; });
}

SignalScope::~SignalScope() { leave({}); }

namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 50ms;
// A wait this long after a signal is of a rank that may not come. Open MPI kills after a second.
constexpr auto kMoment = 300ms;

bool is_about_ranks(const std::exception_ptr& fault) {
  try {
    std::rethrow_exception(fault);
  } catch (const Error& e) {
    return e.kind() == ErrorKind::comm || e.kind() == ErrorKind::internal ||
           e.kind() == ErrorKind::device;
  } catch (...) {
    return true;
  }
}

}  // namespace

LostRankReport::LostRankReport(const Config& config) : config_(config) {
  if (comm::num_launched_processes() > 1) thread_ = std::thread([this] { watch(); });
}

LostRankReport::~LostRankReport() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void LostRankReport::add(int rank) {
  const std::lock_guard lock(mutex_);
  recorders_[rank] = comm::flight::current();
}

void LostRankReport::threw(int rank, const std::exception_ptr& fault) {
  {
    const std::lock_guard lock(mutex_);
    recorders_.erase(rank);
  }
  if (is_about_ranks(fault)) write(rank, *comm::flight::current(), comm::text_of(fault));
}

// A rank may still compute when the signal comes, and wait for the lost one later.
void LostRankReport::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [&] { return is_ending_; }))
    if (const int signal = stop_signal(); signal != 0) say_what_waits(signal);
}

void LostRankReport::say_what_waits(int signal) {
  std::erase_if(recorders_, [&](const auto& entry) {
    const auto& [rank, recorder] = entry;
    const auto waiting = comm::flight::waiting(*recorder);
    if (!waiting || waiting->time < kMoment) return false;
    set_log_rank(rank);
    write(rank, *recorder,
          detail::concat("told to stop by signal ", signal, " while rank ", rank, " has waited ",
                         waiting->time.count(), " s in ", waiting->what));
    return true;
  });
}

void LostRankReport::write(int rank, comm::flight::Recorder& recorder, const std::string& why) {
  if (mesh_shape(config_).num_ranks() == 1) return;
  if (config_.metrics.folder.empty()) return log_warn(why);
  const std::lock_guard lock(writing_);
  const auto path =
      std::filesystem::path(config_.metrics.folder) / formatted("flight-rank-%05d.txt", rank);
  std::ofstream file(path);
  file << comm::flight::text(recorder) << std::flush;
  if (file.good())
    log_warn(why, "; the last collectives of this rank are in '", path.string(), "'");
  else
    log_warn(why, "; the last collectives of this rank could not be written to '", path.string(),
             "'");
}

}  // namespace moesh::train
