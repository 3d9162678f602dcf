#include "moesh/comm/paced.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"

namespace moesh::comm {
namespace {

// Every rank has its own time, which passes only while it sleeps or works: what a wait ends at is
// known to the bit.
class FakeClock final : public PaceClock {
 public:
  explicit FakeClock(double start) : now_(start) {}
  double now() const override { return now_; }
  void sleep_until(double time) const override { now_ = std::max(now_, time); }
  void work(double seconds) const { now_ += seconds; }

 private:
  mutable double now_;
};

// Inside a node 100 bytes/s and 1 s, between nodes 10 bytes/s and 5 s.
constexpr Links kSlow{.inside = {1, 100}, .between = {5, 10}, .ranks_per_node = 2};

// Runs f on 4 ranks, two on a node, and gives the times at which they end. Rank r begins at r.
std::vector<double> ends(const std::function<void(Group&, const FakeClock&)>& f) {
  std::vector<double> all(4);
  PacedWorld paced(kSlow, 0, 4);
  launch(4, [&](Group& world) {
    const FakeClock clock(world.rank());
    Pacer pacer(paced, clock);
    f(world, clock);
    all[static_cast<size_t>(world.rank())] = clock.now();
  });
  return all;
}

TEST(Paced, ACollectiveEndsWhenTheLastRankHasSentItsPart) {
  // 3 bytes for each other rank: 3 inside, 6 between. Rank 3 begins last, at 3.
  const double ready = 3 + 6 / 10. + 5;
  EXPECT_EQ(ends([](Group& world, const FakeClock&) {
              world.all_to_all(at::zeros({12}, at::kBool), {}, {});
            }),
            std::vector<double>(4, ready));
}

TEST(Paced, InsideANodeOnlyItsOwnLinksCount) {
  const auto pair_of = [](Group& world) {
    const ObserverPause quiet;  // split sends, too
    return world.split(world.rank() / 2, world.rank(), "pair");
  };
  EXPECT_EQ(ends([&](Group& world, const FakeClock&) {
              pair_of(world)->all_gather(at::zeros({200}, at::kBool));
            }),
            (std::vector<double>{1 + 2 + 1, 1 + 2 + 1, 3 + 2 + 1, 3 + 2 + 1}));
}

// What a rank computes between start and wait is not added to the time on the way.
TEST(Paced, StartReturnsAtOnceAndWorkHidesTheWay) {
  for (const double work : {2., 100.})
    EXPECT_EQ(ends([&](Group& world, const FakeClock& clock) {
                auto moving = world.start_all_to_all(at::zeros({12}, at::kBool), {}, {});
                EXPECT_EQ(clock.now(), world.rank());
                clock.work(work);
                moving.wait();
              }),
              work == 2 ? std::vector<double>(4, 3 + 6 / 10. + 5)
                        : (std::vector<double>{100, 101, 102, 103}));
}

// Two exchanges share a rank's link: the second one's bytes follow those of the first.
TEST(Paced, ALinkCarriesOneExchangeAfterTheOther) {
  EXPECT_EQ(ends([](Group& world, const FakeClock&) {
              auto first = world.start_all_to_all(at::zeros({400}, at::kBool), {}, {});
              auto second = world.start_all_to_all(at::zeros({400}, at::kBool), {}, {});
              first.wait();
              second.wait();
            }),
            std::vector<double>(4, 3 + 2 * 200 / 10. + 5));
}

TEST(Paced, AMessageComesWhenItsSenderHasSentIt) {
  EXPECT_EQ(ends([](Group& world, const FakeClock& clock) {
              {
                const ObserverPause quiet;
                world.open_channels({{0, 1}, {1, 2}});
              }
              const at::Tensor x = at::zeros({50}, at::kBool);
              const auto options = x.options();
              if (world.rank() == 0) clock.work(10), world.start_send(x, 1).wait();
              if (world.rank() == 1) {
                world.start_recv({50}, options, 0).wait();
                world.start_send(x, 2).wait();
              }
              if (world.rank() == 2) world.start_recv({50}, options, 1).wait();
            }),
            (std::vector<double>{10 + 0.5 + 1, 11.5 + 5 + 5, 11.5 + 5 + 5, 3}));
}

// On a device the thread of a rank goes on, and its queue of work has the times of the links.
thread_local const FakeClock* device_clock = nullptr;

struct FakeMark final : Mark {
  explicit FakeMark(double t) : time(t) {}
  bool done() const override { return device_clock->now() >= time; }
  void hold_current() override { device_clock->sleep_until(time); }
  double time;
};

class FakeLink final : public DeviceLink {
 public:
  std::shared_ptr<Mark> carry(double seconds) override {
    free_ = std::max(device_clock->now(), free_) + seconds;
    return std::make_shared<FakeMark>(free_);
  }

 private:
  double free_ = 0;
};

std::vector<double> ends_on_device(const std::function<void(Group&, const FakeClock&)>& f) {
  std::vector<double> all(4);
  PacedWorld paced(kSlow, 0, 4);
  launch(4, [&](Group& world) {
    const FakeClock host(0), device(world.rank());
    device_clock = &device;
    Pacer pacer(paced, host, [](at::Device) { return std::make_unique<FakeLink>(); });
    f(world, device);
    EXPECT_EQ(host.now(), 0);
    all[static_cast<size_t>(world.rank())] = device.now();
  });
  return all;
}

TEST(Paced, OnADeviceItsQueueWaitsAndNotTheHost) {
  const double between = 6 / 10. + 5;  // rank 3 begins last, at 3
  for (const double work : {2., 100.})
    EXPECT_EQ(ends_on_device([&](Group& world, const FakeClock& clock) {
                auto moving = world.start_all_to_all(at::zeros({12}, at::kBool), {}, {});
                EXPECT_EQ(clock.now(), world.rank());
                clock.work(work);
                moving.wait();
              }),
              work == 2 ? std::vector<double>(4, 3 + between)
                        : (std::vector<double>{100, 101, 102, 103}));
  EXPECT_EQ(ends_on_device([](Group& world, const FakeClock&) {
              auto first = world.start_all_to_all(at::zeros({12}, at::kBool), {}, {});
              auto second = world.start_all_to_all(at::zeros({12}, at::kBool), {}, {});
              first.wait();
              second.wait();
            }),
            std::vector<double>(4, 3 + 2 * between));
}

TEST(Paced, AMessageOnADeviceHoldsBothEnds) {
  EXPECT_EQ(ends_on_device([](Group& world, const FakeClock& clock) {
              {
                const ObserverPause quiet;
                world.open_channels({{0, 1}});
              }
              const at::Tensor x = at::zeros({50}, at::kBool);
              if (world.rank() == 0) clock.work(10), world.start_send(x, 1).wait();
              if (world.rank() == 1) world.start_recv({50}, x.options(), 0).wait();
            }),
            (std::vector<double>{10 + 0.5 + 1, 10 + 0.5 + 1, 2, 3}));
}

// The same values, and waits no shorter than on the links; how much longer is the machine's doing.
TEST(Paced, LaunchSlowsEveryRankDown) {
  const auto start = std::chrono::steady_clock::now();
  launch(4,
         [](Group& world) {
           EXPECT_TRUE(world.all_reduce(at::ones({10}, at::kFloat)).equal(at::full({10}, 4.f)));
         },
         {.links = Links{.inside = {0.02, 1e9}}});
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(20));
}

TEST(Sent, ToOtherNodesGoesWhatTheyNeedOnce) {
  struct Parts final : ThreadObserver {
    void called(const Operation& o) override {
      const SentParts p = sent_parts(o, 2);
      all.emplace_back(p.inside, p.between);
    }
    std::vector<std::pair<std::int64_t, std::int64_t>> all;
  };
  launch(4, [](Group& world) {
    const at::Tensor x = at::zeros({8}, at::kBool);
    Parts parts;
    world.all_to_all(x, {2, 2, 2, 2}, {});
    world.all_gather(x);                         // 24 bytes: once to the other node
    world.reduce_scatter(x, {}, ReduceOp::max);  // 6: of 2 each, reduced on the node first
    world.all_reduce(x, ReduceOp::max);
    EXPECT_EQ(parts.all, (std::vector<std::pair<std::int64_t, std::int64_t>>{
                             {2, 4}, {16, 8}, {4, 2}, {8, 4}}));
  });
}

}  // namespace
}  // namespace moesh::comm
