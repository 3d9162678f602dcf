#include "moesh/train/stop.h"

#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <utility>

namespace moesh::train {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM};

std::atomic<int> received{0};

struct Scopes {
  std::mutex mutex;
  std::condition_variable all_left;
  int num = 0;
  std::uint64_t num_rounds = 0;  // how often the last one has left
  std::array<struct sigaction, kSignals.size()> before = {};
};
Scopes scopes;

// With the lock.
void end_round(const std::function<void(int signal)>& deliver) {
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    sigaction(kSignals[i], &scopes.before[i], nullptr);
  ++scopes.num_rounds;
  if (const int signal = received; signal != 0 && deliver) deliver(signal);
  scopes.all_left.notify_all();
}

}  // namespace

int stop_signal() { return received; }

SignalScope::SignalScope() {
  const std::lock_guard lock(scopes.mutex);
  if (scopes.num++ > 0) return;
  received = 0;
  struct sigaction action = {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = [](int signal) {
    received = signal;
    std::signal(signal, SIG_DFL);
  };
  for (std::size_t i = 0; i < kSignals.size(); ++i)
    sigaction(kSignals[i], &action, &scopes.before[i]);
}

void SignalScope::leave(const std::function<void(int signal)>& deliver) {
  if (std::exchange(has_left_, true)) return;
  std::unique_lock lock(scopes.mutex);
  if (--scopes.num == 0) return end_round(deliver);
  if (received == 0 || !deliver) return;
  scopes.all_left.wait(lock, [round = scopes.num_rounds] { return scopes.num_rounds != round; });
}

SignalScope::~SignalScope() { leave({}); }

}  // namespace moesh::train
