// Ranks that are threads: a fault in one stops all, with a message that names rank, operation and
// sequence number, and the process can start a new world afterwards.

#include "faults.h"

#include <gtest/gtest.h>

#include "moesh/comm/launch.h"

namespace moesh::comm {
namespace {

std::string what_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

// What each rank threw, by rank; the last one is what came out of launch.
std::vector<std::string> texts_of(int num_ranks, const LaunchOptions& options,
                                  const std::function<void(Group&)>& f) {
  std::vector<std::string> texts(static_cast<size_t>(num_ranks), "nothing was thrown");
  texts.push_back(what_of([&] {
    launch(
        num_ranks,
        [&](Group& world) {
          try {
            f(world);
          } catch (const std::exception& e) {
            texts[static_cast<size_t>(world.rank())] = e.what();
            throw;
          }
        },
        options);
  }));
  return texts;
}

void expect_a_world_that_works(int num_ranks) {
  launch(num_ranks, [&](Group& world) {
    const auto sum = world.all_reduce(at::full({3}, world.rank() + 1, at::kLong));
    EXPECT_EQ(sum[0].item<std::int64_t>(), num_ranks * (num_ranks + 1) / 2);
  });
}

class ThreadFaults : public testing::TestWithParam<int> {};

TEST_P(ThreadFaults, NameRankOperationAndSequenceNumber) {
  const int num_ranks = GetParam();
  for (const auto& fault : faults::all()) {
    SCOPED_TRACE(fault.name);
    const auto texts = texts_of(num_ranks, {.timeout = fault.timeout},
                                [&](Group& world) { faults::run(fault, world); });
    for (int r = 0; r < num_ranks; ++r)
      if (r != 1)
        for (const auto& part : fault.texts) expect_contains(texts[static_cast<size_t>(r)], part);
    if (fault.name.starts_with("throws")) {
      EXPECT_EQ(texts.back(), "disk is full");
    } else {
      for (const auto& part : fault.texts) expect_contains(texts.back(), part);
    }
    expect_a_world_that_works(num_ranks);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadFaults, testing::Values(2, 4),
                         testing::PrintToStringParamName());

// A rank that waits for something else than the others is found by the deadline of those.
TEST(ThreadFault, TwoGroupsInTheWrongOrder) {
  const auto texts = texts_of(2, {.timeout = std::chrono::milliseconds(500)}, [](Group& world) {
    const auto twin = world.split(0, 0, "twin");
    (world.rank() == 0 ? *twin : world).all_reduce(at::ones({2}));
  });
  const std::string all = texts[0] + texts[1];
  expect_contains(all, "did not arrive within 0.5 s");
  expect_contains(all, "all_reduce(sum, float32 [2]), operation ");
}

TEST(ThreadFault, InAGroupNamesWorldRanks) {
  const auto texts = texts_of(4, {}, [](Group& world) {
    const auto pair = world.split(world.rank() / 2, 0, "pair");
    if (world.rank() == 3) return;
    pair->all_gather(at::ones({2}));
    pair->barrier();
  });
  expect_contains(
      texts[2],
      "rank 2 waited in all_gather(float32 [2]), operation 0 of group 'pair': rank 3 has returned");
}

TEST(ThreadFault, ARankMayLeaveWhenItsPartIsDone) {
  for (int round = 0; round < 100; ++round)
    launch(4, [&](Group& world) {
      if (world.rank() == round % 4) std::this_thread::yield();
      EXPECT_EQ(world.all_reduce(at::ones({round % 2 ? 2 : 10'000}))[0].item<float>(), 4);
    });
}

TEST(ThreadFault, AnExceptionOfAnyTypeReachesTheCaller) {
  EXPECT_THROW(launch(3, [](Group& world) { world.rank() == 2 ? throw 17 : world.barrier(); }),
               int);
  EXPECT_THROW(launch(1, [](Group&) { throw std::out_of_range("alone"); }), std::out_of_range);
}

// The verdict of `checked` is the verdict of the group below it.
TEST(Checked, FindsTheSameMismatches) {
  for (const auto& fault : faults::all()) {
    if (fault.name.rfind("other_", 0) != 0 || fault.name == "other_counts") continue;
    SCOPED_TRACE(fault.name);
    const auto f = [&](Group& world) { faults::run(fault, world); };
    const auto plain = texts_of(3, {}, f), checked = texts_of(3, {.checked = true}, f);
    EXPECT_EQ(plain[0], checked[0]);
    EXPECT_EQ(checked[0], checked[1]);
    EXPECT_EQ(checked[0], checked[2]);
  }
}

// On whichever end it is found first: the message names both.
TEST(Checked, FindsMessagesThatDoNotFit) {
  for (const auto& fault : faults::all()) {
    if (!fault.name.starts_with("message_of_other")) continue;
    SCOPED_TRACE(fault.name);
    const auto texts =
        texts_of(3, {.checked = true}, [&](Group& world) { faults::run(fault, world); });
    for (const auto& text : texts)
      for (const auto& part : fault.texts) expect_contains(text, part);
  }
}

TEST(Checked, FindsOtherChannels) {
  const auto texts = texts_of(2, {.checked = true}, [](Group& world) {
    world.open_channels({{world.rank(), 1 - world.rank()}});
  });
  expect_contains(texts[0], "'the list of channels' is promised to be the same");
}

TEST(Checked, FindsOtherCounts) {
  const auto texts = texts_of(3, {.checked = true}, [](Group& world) {
    world.all_to_all(at::ones({6}), {2, 2, 2}, world.rank() == 2 ? Rows{1, 2, 2} : Rows{2, 2, 2});
  });
  expect_contains(texts[1],
                  "operation 0 of group 'world', rank 0 sends 2 rows to rank 2, which expects 1");
}

TEST(Checked, FindsAValueThatIsNotTheSame) {
  for (auto dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong}) {
    const auto texts = texts_of(4, {.checked = true}, [&](Group& world) {
      at::Tensor weight = at::ones({5, 3}, dtype);
      world.expect_same(weight, "layers.0.norm.weight");
      if (world.rank() == 2) weight[4][2] = 2;
      world.expect_same(weight, "layers.1.norm.weight");
    });
    for (const auto& text : texts)
      expect_contains(
          text,
          "'layers.1.norm.weight' is promised to be the same on every rank of group 'world' (R or I), and rank 2 holds "
          "a different value from rank 0");
  }
}

TEST(Checked, FindsAnotherShapeOfTheSameBytes) {
  const auto texts = texts_of(2, {.checked = true}, [](Group& world) {
    world.expect_same(world.rank() ? at::ones({2, 3}) : at::ones({3, 2}), "bias");
  });
  expect_contains(texts[0], "'bias' is promised to be the same");
}

TEST(Checked, SplitsIntoCheckedGroups) {
  const auto texts = texts_of(4, {.checked = true}, [](Group& world) {
    const auto pair = world.split(world.rank() % 2, 0, "tp");
    pair->expect_same(at::full({1}, world.rank() == 3 ? 1 : 0), "gate");
  });
  expect_contains(
      texts[1],
      "'gate' is promised to be the same on every rank of group 'tp' (R or I), and rank 3 holds a different value from rank 1");
}

// Without `checked` the promise costs nothing and is not looked at.
TEST(Checked, IsOffByDefault) {
  EXPECT_NO_THROW(
      launch(2, [](Group& world) { world.expect_same(at::full({1}, world.rank()), "rank"); }));
}

}  // namespace
}  // namespace moesh::comm
