#include "python/interruptible.h"

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "moesh/base/this_thread.h"

namespace moesh::python {
namespace nb = nanobind;
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{50};

class Worker {
 public:
  explicit Worker(const std::function<void()>& f) : thread_([this, &f] { work(f); }) {}
  /// Without the GIL: as the thread ends it may free tensors that Python has seen, which takes it.
  ~Worker() {
    const nb::gil_scoped_release no_gil;
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void interrupt() { is_unwanted_ = true; }
  /// Whether f is over, after a moment at most.
  bool is_over() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kBetweenLooks, [&] { return is_over_; });
  }
  /// Once it is.
  std::exception_ptr fault() const { return fault_; }

 private:
  void work(const std::function<void()>& f) {
    const Interruptible scope(&is_unwanted_);
    try {
      f();
    } catch (...) {
      fault_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
  }

  std::atomic<bool> is_unwanted_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::exception_ptr fault_;
  std::thread thread_;  // the last: it uses the others
};

}  // namespace

void run_interruptible(const std::function<void()>& f) {
  Worker worker(f);
  std::optional<nb::python_error> raised;
  for (bool is_over = false; !is_over;) {
    {
      const nb::gil_scoped_release no_gil;
      is_over = worker.is_over();
    }
    if (!raised && PyErr_CheckSignals() != 0) {
      raised.emplace();
      worker.interrupt();
    }
  }
  if (raised) throw nb::python_error(std::move(*raised));
  if (const auto fault = worker.fault()) std::rethrow_exception(fault);
}

}  // namespace moesh::python
