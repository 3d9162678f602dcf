#include "moesh/comm/observers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <optional>
#include <thread>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"

namespace moesh::comm {
namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// Rank 1 does not come to the last one: the records of the others show what they wait in, and that
// of rank 1 what it did before.
TEST(Flight, ShowsWhatEachRankDidLast) {
  for (const bool checked : {false, true}) {
    std::vector<std::string> texts(3);
    const auto f = [&](Group& world) {
      const auto pair = world.split(0, world.rank(), "pair");
      auto& text = texts[static_cast<std::size_t>(world.rank())];
      try {
        world.all_reduce(at::ones({2}));
        auto first = pair->start_all_gather(at::ones({1}));
        auto second = world.start_broadcast(at::ones({3}), 0);
        second.wait();
        first.wait();
        world.barrier();
        if (world.rank() != 1) pair->reduce_scatter(at::ones({3}));
      } catch (...) {
        text = flight::text();
        throw;
      }
      text = flight::text();
    };
    EXPECT_THROW(launch(3, f, {.checked = checked}), Error);
    EXPECT_EQ(count(texts[1], "NOT ENDED"), 0u) << texts[1];
    for (const int r : {0, 2}) {
      const auto& text = texts[static_cast<std::size_t>(r)];
      EXPECT_GE(count(text, "NOT ENDED"), 1u) << text;
      const auto line = text.find("reduce_scatter of 12 bytes on group 'pair'");
      ASSERT_NE(line, std::string::npos) << text;
      EXPECT_EQ(count(text.substr(text.rfind('\n', line) + 1), "took"), 0u) << text;
      EXPECT_NE(text.find("broadcast of 12 bytes on group 'world'"), std::string::npos);
    }
  }
}

// A receive that was begun early is waited for in another action.
TEST(Flight, NamesWhatWaits) {
  launch(2, [&](Group& world) {
    world.open_channels({{0, 1}});
    if (world.rank() == 0) {
      world.barrier();
      world.start_send(at::ones({2}), 1).wait();
      return;
    }
    std::optional<Handle> early;
    {
      const flight::ActivityScope doing("the first");
      early.emplace(world.start_recv({2}, at::kFloat, 0));
    }
    EXPECT_FALSE(flight::waiting(*flight::current()));
    std::thread asks([&, recorder = flight::current()] {
      std::optional<flight::Waiting> waiting;
      while (!waiting) waiting = flight::waiting(*recorder);
      EXPECT_EQ(waiting->what, "recv of 8 bytes on group 'world', in the second");
      const std::string text = flight::text(*recorder);
      EXPECT_NE(text.find("has NOT ENDED and is WAITED FOR  " + waiting->what), std::string::npos)
          << text;
      world.barrier();
    });
    {
      const flight::ActivityScope doing("the second");
      early->wait();
    }
    asks.join();
    EXPECT_FALSE(flight::waiting(*flight::current()));
  });
}

TEST(Flight, HasWhatOtherThreadsOfTheRankDid) {
  launch(2, [&](Group& world) {
    const auto beside = world.background("beside");
    std::thread saving([&, recorder = flight::current()] {
      flight::use(recorder);
      beside->barrier();
    });
    world.barrier();
    saving.join();
    EXPECT_NE(flight::text().find("barrier of 0 bytes on group 'beside'"), std::string::npos)
        << flight::text();
  });
}

// What a rank does with its fault must not delay those that wait for it.
TEST(Flight, TheOthersKnowOfAFaultBeforeARankWritesIt) {
  std::atomic<bool> has_other_left = false;
  bool was_known = false;
  LaunchOptions options;
  options.after_fault = [&](int rank, const std::exception_ptr&) {
    if (rank != 0) return;
    for (int i = 0; i < 500 && !has_other_left; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    was_known = has_other_left;
  };
  const auto f = [&](Group& world) {
    if (world.rank() == 0) throw Error(ErrorKind::internal, "a fault");
    try {
      world.barrier();
    } catch (const Error&) {
      has_other_left = true;
      throw;
    }
  };
  EXPECT_THROW(launch(2, f, options), Error);
  EXPECT_TRUE(was_known);
}

TEST(Flight, RemembersTheLast) {
  launch(2, [&](Group& world) {
    for (int i = 0; i < 300; ++i) world.barrier();
    const std::string text = flight::text();
    EXPECT_EQ(count(text, "\n"), flight::kLength);
    EXPECT_EQ(text.find("44  "), 0u) << text.substr(0, 80);
    EXPECT_EQ(count(text, "NOT ENDED"), 0u);
  });
}

}  // namespace
}  // namespace moesh::comm
