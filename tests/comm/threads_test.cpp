// The conformance suite on ranks that are threads, with and without `checked`.

#include "moesh/comm/threads/thread_world.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "conformance.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/paced.h"
#include "nccl_loopback.h"

namespace moesh::comm {
namespace {

struct Param {
  int num_ranks;
  bool checked;
};

void PrintTo(const Param& p, std::ostream* os) {
  *os << p.num_ranks << (p.checked ? " ranks, checked" : " ranks");
}

// Checksums are summed as numbers that wrap around (make asan shows where that is undefined).
TEST(Fold, WholeNumbersWrapAround) {
  launch(3, [](Group& world) {
    for (const auto dtype : {at::kLong, at::kInt}) {
      const at::Tensor most = at::full(
          {5}, dtype == at::kLong ? std::numeric_limits<std::int64_t>::max() : 2147483647, dtype);
      EXPECT_TRUE(world.all_reduce(most).eq(most - 2).all().item<bool>());
    }
  });
}

class ThreadConformance : public testing::TestWithParam<Param> {};

TEST_P(ThreadConformance, Holds) {
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    try {
      launch(GetParam().num_ranks,
             [&](Group& world) {
               c.run(world, {.checked = GetParam().checked, .any_order = !GetParam().checked});
             },
             {.timeout = std::chrono::seconds(60), .checked = GetParam().checked});
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadConformance,
                         testing::Values(Param{1, false}, Param{2, false}, Param{3, false},
                                         Param{4, false}, Param{8, false}, Param{1, true},
                                         Param{2, true}, Param{3, true}, Param{4, true},
                                         Param{8, true}),
                         [](const auto& info) {
                           return std::to_string(info.param.num_ranks) +
                                  (info.param.checked ? "_checked" : "");
                         });

// As on a device: what others sent is read on a queue, beside the thread of the rank.
void launch_with_queues(int num_ranks, const std::function<void(Group&)>& f) {
  const auto world = ThreadWorld::create(num_ranks, std::chrono::seconds(60),
                                         [](at::Device) { return loopback::host_stream(); });
  run_rank_threads(
      {.count = num_ranks,
       .num_on_machine = num_ranks,
       .group = [&](int rank) { return world->group(rank); },
       .leave = [&](int rank, std::exception_ptr fault) { world->leave(rank, fault); }},
      f, {});
  if (const auto fault = world->roll().first_exception()) std::rethrow_exception(fault);
}

TEST(Threads, ConformWhereRanksReadOnQueues) {
  for (const int num_ranks : {2, 4})
    for (const auto& c : conformance::cases()) {
      SCOPED_TRACE(c.name);
      EXPECT_NO_THROW(
          launch_with_queues(num_ranks, [&](Group& world) { c.run(world, {.any_order = true}); }));
    }
}

// Slower links change no result.
TEST(Threads, ConformOnSlowerLinks) {
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    EXPECT_NO_THROW(
        launch(4, [&](Group& world) { c.run(world, {.any_order = true}); },
               {.timeout = std::chrono::seconds(60), .links = Links{{1e-6, 1e9}, {5e-6, 1e8}, 2}}));
  }
}

// A sender's memory is its own again when its wait ends, and not before peers have read it.
TEST(Threads, AWaitHoldsUntilPeersHaveReadOnTheirQueues) {
  launch_with_queues(3, [](Group& world) {
    for (int round = 0; round < 50; ++round) {
      at::Tensor x = at::full({3 * 10000}, world.rank() + 10 * round, at::kInt);
      const at::Tensor got = world.start_all_to_all(x, {}, {}).wait();
      x.fill_(-1);
      for (int r = 0; r < 3; ++r)
        EXPECT_TRUE(got.narrow(0, 10000 * r, 10000).eq(r + 10 * round).all().item<bool>());
    }
  });
}

TEST(Threads, DigestIsTheSameInEveryRun) {
  std::uint64_t first = 0;
  for (int run = 0; run < 3; ++run)
    launch(4, [&](Group& world) {
      const auto value = conformance::digest(world, {}, 5);
      if (world.rank() != 0) return;
      if (run == 0) first = value;
      EXPECT_EQ(value, first);
    });
  EXPECT_NE(first, 0u);
}

TEST(Threads, NobodyPassesABarrierBeforeTheLastHasCome) {
  std::atomic<int> num_come = 0;
  launch(4, [&](Group& world) {
    for (int round = 1; round <= 50; ++round) {
      if (world.rank() == round % 4) std::this_thread::yield();
      ++num_come;
      world.barrier();
      EXPECT_GE(num_come, 4 * round);
      world.barrier();
    }
  });
  EXPECT_EQ(num_come, 200);
}

TEST(Threads, EachRankHasItsOwnThread) {
  std::vector<std::thread::id> ids(4);
  launch(4, [&](Group& world) {
    EXPECT_EQ(world.size(), 4);
    EXPECT_EQ(world.name(), "world");
    ids[static_cast<size_t>(world.rank())] = std::this_thread::get_id();
  });
  for (size_t a = 0; a < 4; ++a)
    for (size_t b = 0; b < a; ++b) EXPECT_NE(ids[a], ids[b]);
}

// The address space ends before the stacks of all threads are in it.
TEST(Threads, ThatCannotBeMadeAreAnErrorWithANumber) {
  std::int64_t num_pages = 0;
  std::ifstream("/proc/self/statm") >> num_pages;
  rlimit before;
  getrlimit(RLIMIT_AS, &before);
  rlimit small = before;
  small.rlim_cur = static_cast<rlim_t>(num_pages * getpagesize() + (std::int64_t{600} << 20));
  setrlimit(RLIMIT_AS, &small);
  std::string text;
  try {
    launch(400, [](Group& world) { world.barrier(); });
  } catch (const Error& e) {
    text = e.what();
    EXPECT_EQ(e.kind(), ErrorKind::config);
  }
  setrlimit(RLIMIT_AS, &before);
  EXPECT_EQ(text.find("of 400 ranks in this process, only "), 0u) << text;
  EXPECT_NE(text.find("take fewer ranks"), std::string::npos) << text;
}

TEST(Threads, WorldOfNoRanksIsRefused) {
  EXPECT_THROW(launch(0, [](Group&) {}), Error);
  EXPECT_THROW(launch(2, [](Group&) {}, {.timeout = std::chrono::milliseconds(0)}), Error);
  EXPECT_THROW(launch(2, [](Group&) {}, {.num_threads = -1}), Error);
}

TEST(Solo, GroupOfOneNeedsNoWorld) {
  const auto g = solo_group();
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    EXPECT_NO_THROW(c.run(*g, {}));
  }
}

}  // namespace
}  // namespace moesh::comm
