#include "moesh/kernels/cpu/tasks.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace moesh::kernels::cpu {
namespace {

class Tasks : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(4); }
  void TearDown() override { at::set_num_threads(before_); }
  int before_ = at::get_num_threads();
};

TEST_F(Tasks, EachRunsOnce) {
  for (std::int64_t n : {0, 1, 3, 100}) {
    std::vector<std::atomic<int>> runs(n);
    const std::int64_t workers = num_workers(n);  // inside a task the answer is 1
    run_tasks(n, [&](std::int64_t task, std::int64_t worker) {
      ++runs[task];
      EXPECT_LT(worker, workers);
    });
    for (const auto& count : runs) EXPECT_EQ(count, 1);
  }
}

// Four tasks that wait for each other can only end if four threads run them.
TEST_F(Tasks, RunAtTheSameTime) {
  std::atomic<int> arrived{0};
  std::set<std::int64_t> workers;
  std::mutex mutex;
  run_tasks(4, [&](std::int64_t, std::int64_t worker) {
    ++arrived;
    while (arrived < 4) std::this_thread::yield();
    const std::lock_guard lock(mutex);
    workers.insert(worker);
  });
  EXPECT_EQ(workers.size(), 4);
}

TEST_F(Tasks, RangesCoverAll) {
  for (std::int64_t size : {0, 1, 5, 64, 1001}) {
    std::vector<std::atomic<int>> seen(size);
    run_ranges(size, 7, [&](std::int64_t begin, std::int64_t end) {
      EXPECT_LE(end - begin, 7);
      for (std::int64_t i = begin; i < end; ++i) ++seen[i];
    });
    for (const auto& count : seen) EXPECT_EQ(count, 1);
  }
}

TEST_F(Tasks, AnExceptionComesBack) {
  try {
    run_tasks(50, [&](std::int64_t task, std::int64_t) {
      if (task == 20) throw std::runtime_error("task 20");
    });
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "task 20");
  }
}

TEST_F(Tasks, InsideATaskRunOnItsThread) {
  std::atomic<int> runs{0};
  run_tasks(4, [&](std::int64_t, std::int64_t) {
    const auto thread = std::this_thread::get_id();
    run_tasks(3, [&](std::int64_t, std::int64_t worker) {
      EXPECT_EQ(worker, 0);
      EXPECT_EQ(std::this_thread::get_id(), thread);
      ++runs;
    });
  });
  EXPECT_EQ(runs, 12);
}

}  // namespace
}  // namespace moesh::kernels::cpu
