#include "moesh/base/turns.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/this_thread.h"
#include "moesh/base/timeline.h"

namespace moesh {

// Which piece of work may run.
class Turns {
 public:
  explicit Turns(std::size_t count) : has_ended_(count, false) {}

  // Returns when it is the turn of this one.
  void await(std::size_t me) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return whose_ == me; });
  }
  void pass_on(std::size_t me) {
    const std::lock_guard lock(mutex_);
    const std::size_t n = has_ended_.size();
    for (std::size_t k = 1; k <= n; ++k)
      if (const std::size_t next = (me + k) % n; !has_ended_[next]) {
        whose_ = next;
        break;
      }
    changed_.notify_all();
  }
  void end(std::size_t me, std::exception_ptr fault) {
    {
      const std::lock_guard lock(mutex_);
      has_ended_[me] = true;
      ++num_ended_;
      if (!fault_) fault_ = fault;
    }
    pass_on(me);
  }
  void await_all() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_ended_ == has_ended_.size(); });
  }
  std::exception_ptr fault() {
    const std::lock_guard lock(mutex_);
    return fault_;
  }

 private:
  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::size_t whose_ = 0, num_ended_ = 0;
  std::vector<bool> has_ended_;
  std::exception_ptr fault_;  // the first
};

namespace {

// A thread that does one piece of work after the other.
class Helper {
 public:
  Helper() : thread_([this] { run(); }) {}
  ~Helper() {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  void start(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      work_ = std::move(work);
    }
    changed_.notify_all();
  }
  // Returns when it has done what it was given.
  void await() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !work_; });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return work_ || is_ending_; });
      if (!work_) return;
      lock.unlock();
      work_();
      lock.lock();
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::function<void()> work_;  // null: none
  bool is_ending_ = false;
  std::thread thread_;
};

// The threads for all work but the first, which live as long as this thread: libraries prepare for
// each thread anew. LibTorch does so with cuDNN's plans of attention, some 0.2 s of the host each
// (bench/results/overlap_pipeline.md has where that number is from).
Helper& helper(std::size_t place) {
  thread_local std::vector<std::unique_ptr<Helper>> all;
  while (all.size() < place) all.push_back(std::make_unique<Helper>());
  return *all[place - 1];
}

constexpr const char* kOthersTurn = "turn of the other";

// `last` is called at the end of its last turn.
void run_in_turn(Turns& turns, std::size_t me, const std::function<void()>& work,
                 const std::function<void()>& last) {
  std::exception_ptr fault;
  turns.await(me);
  if (!turns.fault()) {
    this_thread.turns = &turns, this_thread.place = me;
    try {
      work();
    } catch (...) {
      fault = std::current_exception();
    }
    this_thread.turns = nullptr;
  }
  last();
  turns.end(me, fault);
}

}  // namespace

void take_turns(const std::vector<std::function<void()>>& work) {
  MOESH_CHECK(
      !work.empty() && !this_thread.turns, "turns of ", work.size(),
      " pieces of work, inside a piece that already takes turns: ", this_thread.turns != nullptr);
  Turns turns(work.size());
  SectionClock* const clock = this_thread.clock;
  const Section section = clock ? clock->current() : Section::other;
  std::vector<Helper*> helpers;
  for (std::size_t i = 1; i < work.size(); ++i) try {
      helpers.push_back(&helper(i));
      helpers.back()->start([&, i, mine = this_thread] {
        const ScopedValue while_it_works(this_thread, mine);
        set_log_rank(mine.rank);
        work_for_rank(mine.rank, static_cast<int>(i));
        turns.await(i);
        if (clock) clock->enter(section);
        run_in_turn(turns, i, work[i], [] {});
      });
    } catch (const std::system_error& e) {
      turns.end(i, std::make_exception_ptr(
                       Error(ErrorKind::config,
                             detail::concat("no thread for the other work of a rank: ", e.what(),
                                            "; raise the limits of the "
                                            "system (ulimit -u, -v)"))));
    }
  std::optional<InSlice> others;
  run_in_turn(turns, 0, work[0], [&] { others.emplace(SliceKind::turn, kOthersTurn); });
  turns.await_all();
  for (Helper* const h : helpers) h->await();
  others.reset();
  if (clock) clock->enter(section);
  if (const auto fault = turns.fault()) std::rethrow_exception(fault);
}

void next_turn() {
  Turns* const turns = this_thread.turns;
  if (!turns) return;
  SectionClock* const clock = this_thread.clock;
  const Section section = clock ? clock->current() : Section::other;
  const InSlice others(SliceKind::turn, kOthersTurn);
  turns->pass_on(this_thread.place);
  turns->await(this_thread.place);
  if (clock) clock->enter(section);
  MOESH_CHECK(!turns->fault(), "the other work of this rank has failed");
}

}  // namespace moesh
