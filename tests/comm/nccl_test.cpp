// The nccl backend over a loopback table on the CPU: its whole logic but for the device itself.
// nccl_gpu_test.cpp has the rest.

#include "moesh/comm/nccl/nccl_group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <latch>
#include <optional>
#include <thread>

#include "conformance.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/nccl/world.h"
#include "moesh/comm/observers.h"
#include "nccl_loopback.h"

namespace moesh::comm {
namespace {

using loopback::Pace;
using namespace std::chrono_literals;

// What `f` throws; empty if it does not.
std::string error_of(const std::function<void()>& f, ErrorKind kind = ErrorKind::comm) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(to_string(e.kind()), std::string(to_string(kind))) << e.what();
    return e.what();
  }
  return {};
}

void expect_text(const std::string& got, const std::vector<std::string>& texts) {
  for (const auto& text : texts)
    EXPECT_NE(got.find(text), std::string::npos) << "'" << text << "' is not in: " << got;
}

std::string name_of(Pace pace) { return pace == Pace::queued ? "queued" : "polled"; }

// ---------------------------------------------------------------- what every backend does

struct Param {
  int num_ranks;
  Pace pace;
  bool checked;
};

class NcclConformance : public testing::TestWithParam<Param> {};

TEST_P(NcclConformance, Holds) {
  const auto [num_ranks, pace, is_checked] = GetParam();
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    const auto nccl = loopback::make(at::kCPU, pace);
    try {
      launch(num_ranks, [&, is_checked = is_checked](Group& bootstrap) {
        auto world = nccl_world(bootstrap, at::kCPU,
                                {.timeout = 60s, .block_host = is_checked, .api = nccl.api});
        if (is_checked) check_ranks(*world);
        c.run(*world, {.checked = is_checked});
      });
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
    EXPECT_GE(nccl.count->created, num_ranks);
    EXPECT_EQ(nccl.count->destroyed, nccl.count->created);
    EXPECT_EQ(nccl.count->aborted, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Loopback, NcclConformance,
    testing::Values(Param{1, Pace::queued, false}, Param{2, Pace::queued, false},
                    Param{3, Pace::queued, false}, Param{4, Pace::queued, false},
                    Param{2, Pace::polled, false}, Param{3, Pace::polled, false},
                    Param{4, Pace::polled, false}, Param{2, Pace::queued, true},
                    Param{3, Pace::polled, true}),
    [](const auto& info) {
      return std::to_string(info.param.num_ranks) + "_" + name_of(info.param.pace) +
             (info.param.checked ? "_checked" : "");
    });

// Sums of the loopback table have the bits of threads, so everything has.
TEST(Nccl, DigestIsThatOfThreads) {
  std::atomic<std::uint64_t> of_threads = 0, of_nccl = 0;
  const auto nccl = loopback::make(at::kCPU, Pace::queued);
  launch(3, [&](Group& host) {
    of_threads = conformance::digest(host, {}, 11);
    of_nccl = conformance::digest(*nccl_world(host, at::kCPU, {.api = nccl.api}), {}, 11);
  });
  EXPECT_NE(of_threads, 0u);
  EXPECT_EQ(of_threads, of_nccl);
}

// ---------------------------------------------------------------- which calls are made

struct Calls {
  std::atomic<int> all_gather = 0, reduce_scatter = 0, send = 0, recv = 0, group = 0;
};

// The table, counting the calls of all ranks.
std::shared_ptr<const NcclApi> counting(const NcclApi& inner, Calls& calls) {
  auto api = std::make_shared<NcclApi>(inner);
  api->all_gather = [&calls, f = inner.all_gather](auto... args) {
    return ++calls.all_gather, f(args...);
  };
  api->reduce_scatter = [&calls, f = inner.reduce_scatter](auto... args) {
    return ++calls.reduce_scatter, f(args...);
  };
  api->send = [&calls, f = inner.send](auto... args) { return ++calls.send, f(args...); };
  api->recv = [&calls, f = inner.recv](auto... args) { return ++calls.recv, f(args...); };
  api->group_start = [&calls, f = inner.group_start] { return ++calls.group, f(); };
  return api;
}

TEST(Nccl, EvenShardsAreNativeAndUnevenOnesAreMessages) {
  Calls calls;
  const auto api = counting(*loopback::make(at::kCPU, Pace::queued).api, calls);
  launch(3, [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, at::kCPU, {.api = api});
    const auto x = at::full({6, 2}, world->rank() + 1.0);
    const auto rank = static_cast<size_t>(world->rank());
    const auto expect = [&](int all_gather, int reduce_scatter, int messages, int groups) {
      world->barrier();
      EXPECT_EQ(calls.all_gather, all_gather);
      EXPECT_EQ(calls.reduce_scatter, reduce_scatter);
      EXPECT_EQ(calls.send, messages);
      EXPECT_EQ(calls.recv, messages);
      EXPECT_EQ(calls.group, groups);
      world->barrier();
    };
    world->all_gather(x);
    expect(3, 0, 0, 0);
    world->reduce_scatter(x);
    expect(3, 3, 0, 0);
    const Rows rows{4, 0, 2};
    EXPECT_TRUE(world->reduce_scatter(x, rows).equal(at::full({rows[rank], 2}, 6.0)));
    expect(3, 3, 6, 3);  // everyone sends to ranks 0 and 2
    world->all_gather(x.narrow(0, 0, rows[rank]), rows);
    expect(3, 3, 12, 6);  // ranks 0 and 2 send to everyone
    world->all_to_all(x, {2, 2, 2}, {2, 2, 2});
    expect(3, 3, 21, 9);
    world->all_gather(at::zeros({0, 4}));
    expect(3, 3, 21, 9);  // nothing to move
  });
}

// What NCCL reads and writes stays, however soon the caller lets go of it, and goes when the
// operation has been waited for.
TEST(Nccl, MemoryIsKeptAsLongAsItIsUsed) {
  for (const Rows& rows : {Rows{3000, 3000}, Rows{1000, 5000}}) {
    const auto nccl = loopback::make(at::kCPU, Pace::queued);
    launch(2, [&](Group& bootstrap) {
      auto world = nccl_world(bootstrap, at::kCPU, {.api = nccl.api});
      const auto rank = static_cast<size_t>(world->rank());
      if (rank == 1)
        std::this_thread::sleep_for(20ms);  // so that rank 0 lets go before the peer reads
      auto handle = world->start_reduce_scatter(at::full({6000}, rank + 1.0), rows);
      const auto noise = at::full({6000}, -1.0);  // would take the place of memory that was freed
      EXPECT_TRUE(handle.wait().equal(at::full({rows[rank]}, 3.0)));
      EXPECT_EQ(noise.sum().item<double>(), -6000.0);

      const auto x = at::full({6000}, 1.0);
      EXPECT_TRUE(world->reduce_scatter(x, rows).equal(at::full({rows[rank]}, 2.0)));
      EXPECT_EQ(x.storage().use_count(), 1u);
    });
  }
}

TEST(Nccl, ControlDeviceIsItsOwn) {
  const auto nccl = loopback::make(at::kCPU, Pace::queued);
  launch(2, [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, at::kCPU, {.api = nccl.api});
    EXPECT_EQ(world->control_device(), at::Device(at::kCPU));
    expect_text(
        error_of([&] { world->all_reduce(at::empty({2}, at::kMeta)); }),
        {"all_reduce on group 'world'", "the tensor is on meta, and this NCCL group works on cpu",
         "x.to(group.control_device())"});
    EXPECT_EQ(world->all_reduce(at::ones({1})).item<float>(), 2.0f);
  });
}

// ---------------------------------------------------------------- faults

class NcclFault : public testing::TestWithParam<Pace> {};
INSTANTIATE_TEST_SUITE_P(Loopback, NcclFault, testing::Values(Pace::queued, Pace::polled),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(NcclFault, RankThatNeverComesIsMissedAtTheDeadline) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  launch(3, [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, at::kCPU, {.timeout = 1s, .api = nccl.api});
    auto tp = world->split(0, 0, "tp");
    tp->all_reduce(at::ones({2}));
    if (world->rank() != 1) {
      const auto me = detail::concat("rank ", world->rank(), " waited in ");
      const auto first = error_of([&] { tp->all_reduce(at::ones({2, 3}), ReduceOp::max); });
      expect_text(first, {me, "all_reduce(max, float32 [2, 3]), operation 1 of group 'tp'",
                          "not done within 1 s", "ranks [0, 1, 2]"});
      // Every group of the world is over, and says why.
      EXPECT_EQ(error_of([&] { world->barrier(); }), first);
      EXPECT_EQ(error_of([&] { tp->all_gather(at::ones({2})); }), first);
      EXPECT_EQ(error_of([&] { world->split(0, 0, "late"); }), first);
    }
    bootstrap.barrier();
  });
  EXPECT_EQ(nccl.count->created, 6);
  EXPECT_EQ(nccl.count->destroyed + nccl.count->aborted, 6);
  EXPECT_GE(nccl.count->aborted, 4);
  // The process can start a new world.
  launch(3, [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, at::kCPU, {.api = nccl.api});
    EXPECT_EQ(world->all_reduce(at::ones({1})).item<float>(), 3.0f);
  });
}

TEST_P(NcclFault, EveryOperationHasADeadline) {
  const std::vector<std::pair<std::function<void(Group&)>, std::string>> operations{
      {[](Group& g) { g.all_gather(at::ones({g.rank() + 1}), {1, 2}); },
       "all_gather(float32 [1]), operation 0"},
      {[](Group& g) { g.reduce_scatter(at::ones({3}), {1, 2}); },
       "reduce_scatter(sum, float32 [3]), operation 0"},
      {[](Group& g) { g.all_to_all(at::ones({4}), {1, 3}, {1, 2}); },
       "all_to_all(float32 [4]), operation 0"},
      {[](Group& g) { g.broadcast(at::ones({2}), 0); },
       "broadcast(from rank 0, float32 [2]), operation 0"},
      {[](Group& g) { g.barrier(); }, "barrier, operation 0"},
      {[](Group& g) { g.start_send(at::ones({2}), 1).wait(); },
       "send(float32 [2] to rank 1), message 0"},
      {[](Group& g) { g.start_recv({2}, at::kFloat, 1).wait(); },
       "recv(float32 [2] from rank 1), message 0"},
      {[](Group& g) { g.split(0, 0, "tp"); }, "all_gather(int64 [1, 2]), operation 0"},
  };
  for (const auto& [operation, text] : operations) {
    const auto nccl = loopback::make(at::kCPU, GetParam());
    launch(2, [&, &operation = operation, &text = text](Group& bootstrap) {
      auto world = nccl_world(bootstrap, at::kCPU, {.timeout = 500ms, .api = nccl.api});
      if (text.find("message") != std::string::npos) world->open_channels({{0, 1}, {1, 0}});
      if (world->rank() == 0)
        expect_text(error_of([&] { operation(*world); }),
                    {"rank 0 waited in", text, "of group 'world'", "0.5 s"});
      bootstrap.barrier();
      stop_nccl(*world, "over");  // there is no one left to end it with
    });
  }
}

// A message that was begun early is late when somebody has waited for it too long, and not before.
TEST_P(NcclFault, TheTimeOfAMessageIsThatOfItsWait) {
  for (const bool is_checked : {false, true}) {
    const auto nccl = loopback::make(at::kCPU, GetParam());
    launch(2, [&](Group& bootstrap) {
      auto world = nccl_world(bootstrap, at::kCPU,
                              {.timeout = 1s, .block_host = is_checked, .api = nccl.api});
      world->open_channels({{0, 1}});
      std::optional<Handle> early, later;
      if (world->rank() == 1) early.emplace(world->start_recv({2}, at::kFloat, 0));
      if (world->rank() == 1) later.emplace(world->start_recv({3}, at::kFloat, 0));
      std::this_thread::sleep_for(1500ms);
      if (world->rank() == 0) world->start_send(at::ones({2}), 1).wait();
      if (world->rank() == 1) {
        EXPECT_TRUE(at::equal(early->wait(), at::ones({2})));
        expect_text(error_of([&] { later->wait(), world->barrier(); }),
                    {"rank 1 waited in recv(float32 [3] from rank 0), message 1", "1 s"});
      }
      bootstrap.barrier();
      stop_nccl(*world, "over");
    });
  }
}

// The host may have called many at once.
TEST_P(NcclFault, TheTimeOfACollectiveBeginsWhenAnotherHasEnded) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  launch(2, [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, at::kCPU, {.timeout = 1s, .api = nccl.api});
    std::vector<Handle> sums;
    for (int i = 0; i < 3; ++i) {
      if (world->rank() == 1) std::this_thread::sleep_for(500ms);
      sums.push_back(world->start_all_reduce(at::full({2}, i)));
    }
    for (int i = 0; i < 3; ++i)
      EXPECT_TRUE(at::equal(sums[static_cast<size_t>(i)].wait(), at::full({2}, 2 * i)));
  });
  EXPECT_EQ(nccl.count->aborted, 0);
}

TEST_P(NcclFault, GroupWhoseMembersDoNotComeDoesNotStart) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  NcclWorld world(nccl.api, at::kCPU, 4, 100ms, false);
  const auto pair = std::make_shared<const NcclGroupInfo>(NcclGroupInfo{"pair", {4, 5}});
  const auto text = error_of([&] { world.join(world.new_id(), 0, pair); });
  expect_text(text, {"rank 4 waited in the start of group 'pair'", "0.1 s", "ranks [4, 5]"});
  EXPECT_EQ(error_of([&] { world.throw_if_stopped(); }), text);
  EXPECT_EQ(nccl.count->aborted, 1);
}

TEST_P(NcclFault, ErrorsOfTheLibraryComeWithTheirText) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  launch(2, [&](Group& bootstrap) {
    auto world =
        nccl_world(bootstrap, at::kCPU, {.timeout = 20s, .block_host = true, .api = nccl.api});
    const auto text = error_of([&] { world->all_reduce(at::ones({2 + world->rank()})); });
    expect_text(text, {detail::concat("rank ", world->rank(), ", in all_reduce(sum, float32 [",
                                      2 + world->rank(), "]), operation 0 of group 'world'"),
                       "NCCL answered 5", "the ranks disagree on collective 0"});
  });
}

TEST_P(NcclFault, CheckedNamesTheRankThatIsOutOfStep) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  const auto run = [&](const std::function<void(Group&)>& f) {
    std::vector<std::string> texts(3);
    launch(3, [&](Group& bootstrap) {
      auto world =
          nccl_world(bootstrap, at::kCPU, {.timeout = 20s, .block_host = true, .api = nccl.api});
      check_ranks(*world);
      world->all_reduce(at::ones({2}));
      texts[static_cast<size_t>(world->rank())] = error_of([&] { f(*world); });
    });
    return texts;
  };
  const auto other_call = run([](Group& g) {
    if (g.rank() == 1)
      g.all_gather(at::ones({2}));
    else
      g.all_reduce(at::ones({2}));
  });
  for (const auto& text : other_call)
    expect_text(text, {"rank 1 called all_gather(float32 [2]) as operation 1 of group 'world'",
                       "rank 0 called all_reduce(sum, float32 [2])"});
  const auto other_shape = run([](Group& g) { g.all_reduce(at::ones({g.rank() == 2 ? 3 : 2})); });
  for (const auto& text : other_shape)
    expect_text(text,
                {"rank 2 called all_reduce(sum, float32 [3]) as operation 1 of group 'world'"});
  const auto other_value =
      run([](Group& g) { g.expect_same(at::full({2}, g.rank() == 2 ? 1.0 : 0.0), "gate.weight"); });
  for (const auto& text : other_value)
    expect_text(text, {"'gate.weight'", "rank 2 holds a different value from rank 0"});
  EXPECT_EQ(nccl.count->aborted, 0);  // nothing was left waiting
}

// NCCL itself knows neither type nor label, and may wait for ever where counts differ.
TEST_P(NcclFault, CheckedNamesBothEndsOfAMessage) {
  const std::vector<std::pair<std::function<void(Group&)>, std::string>> sends{
      {[](Group& g) { g.start_send(at::ones({3}), 0, 5).wait(); }, "send(float32 [3] with label 5"},
      {[](Group& g) { g.start_send(at::ones({2}, at::kInt), 0, 5).wait(); },
       "send(int32 [2] with label 5"},
      {[](Group& g) { g.start_send(at::ones({2}), 0, 6).wait(); }, "send(float32 [2] with label 6"},
  };
  for (const auto& [send, text] : sends) {
    const auto nccl = loopback::make(at::kCPU, GetParam());
    std::string got;
    const auto program = [&, &send = send](Group& world) {
      world.open_channels({{1, 0}});
      if (world.rank() == 1) send(world);
      if (world.rank() == 0)
        got = error_of([&] { world.start_recv({2}, at::kFloat, 1, 5).wait(); });
      world.barrier();
    };
    EXPECT_NE(error_of([&] {
                launch(2,
                       on_nccl(program, {.timeout = 2s, .checked = true, .backend = Backend::nccl},
                               nccl.api));
              }),
              "");
    expect_text(got, {"rank 1 called " + text + " to rank 0)",
                      "rank 0 called recv(float32 [2] with label 5 from rank 1) as message 0"});
  }
}

// A rank that ends by an exception with messages on their way holds up nobody.
TEST(NcclLaunch, FaultOfOneRankStopsMessages) {
  for (Pace pace : {Pace::queued, Pace::polled}) {
    const auto nccl = loopback::make(at::kCPU, pace);
    std::vector<std::string> texts(3);
    std::latch ready(3);
    const auto program = [&](Group& world) {
      world.open_channels({{0, 1}, {1, 2}});
      ready.arrive_and_wait();
      std::vector<Handle> handles;
      if (world.rank() == 1) {
        handles.push_back(world.start_send(at::ones({3}), 2));
        handles.push_back(world.start_send(at::ones({3}), 2));
        throw std::runtime_error("rank 1 has had enough");
      }
      texts[static_cast<size_t>(world.rank())] = error_of([&] {
        if (world.rank() == 0) world.start_send(at::ones({3}), 1).wait();
        if (world.rank() == 2)
          for (int i = 0; i < 3; ++i) world.start_recv({3}, at::kFloat, 1).wait();
      });
      throw Error(ErrorKind::comm, "as well");
    };
    EXPECT_THROW(launch(3, on_nccl(program, {.backend = Backend::nccl}, nccl.api)),
                 std::runtime_error);
    EXPECT_EQ(texts[0], "rank 1 failed: rank 1 has had enough");
    EXPECT_EQ(texts[2], "rank 1 failed: rank 1 has had enough");
  }
}

// Another thread ends the world: a rank that waits for its peers wakes up with the reason.
TEST_P(NcclFault, StopWakesARankThatWaits) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  std::shared_ptr<Group> of_zero;
  std::latch ready(2);
  launch(2, [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, at::kCPU, {.timeout = 60s, .api = nccl.api});
    if (world->rank() == 0) of_zero = world;
    ready.arrive_and_wait();
    if (world->rank() == 0) {
      EXPECT_EQ(error_of([&] { world->all_reduce(at::ones({2})); }), "rank 1 failed: out of luck");
    } else {
      std::this_thread::sleep_for(20ms);
      stop_nccl(*of_zero, "rank 1 failed: out of luck");
      stop_nccl(*of_zero, "a second reason");
      stop_nccl(*world, "it was me");
    }
    bootstrap.barrier();
    if (world->rank() == 0) of_zero.reset();
  });
  EXPECT_EQ(nccl.count->aborted, 2);
}

// A world that is left by an exception does not wait for its peers, which may never end theirs.
TEST_P(NcclFault, ExceptionAborts) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  const auto text = error_of(
      [&] {
        launch(2, [&](Group& bootstrap) {
          auto world = nccl_world(bootstrap, at::kCPU, {.timeout = 60s, .api = nccl.api});
          bootstrap.barrier();
          if (world->rank() == 0) throw Error(ErrorKind::data, "no such file");
          stop_nccl(*world, "a peer is gone");
        });
      },
      ErrorKind::data);
  EXPECT_EQ(text, "no such file");
  EXPECT_EQ(nccl.count->aborted, 2);
}

TEST_P(NcclFault, ClosedWorldTakesNoCalls) {
  const auto nccl = loopback::make(at::kCPU, GetParam());
  launch(2, [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, at::kCPU, {.api = nccl.api});
    auto pair = world->split(0, 0, "pair");
    auto handle = pair->start_all_reduce(at::ones({1}));
    EXPECT_EQ(handle.wait().item<float>(), 2.0f);
    close_nccl(*world);
    expect_text(error_of([&] { pair->all_reduce(at::ones({1})); }), {"this NCCL world has ended"});
    expect_text(error_of([&] { close_nccl(*world); }), {"this NCCL world has ended"});
  });
  EXPECT_EQ(nccl.count->destroyed, 4);
  EXPECT_EQ(nccl.count->aborted, 0);
}

// ---------------------------------------------------------------- a device that hangs

// Whoever asks it whether something has ended gets no answer.
class HangingStream final : public CommStream {
 public:
  explicit HangingStream(std::unique_ptr<CommStream> stream) : stream_(std::move(stream)) {}
  void* handle() override { return stream_->handle(); }
  std::shared_ptr<StreamOrigin> here() override { return stream_->here(); }
  void follow(const StreamOrigin& origin) override { stream_->follow(origin); }
  void run(const std::function<void()>& f) override { stream_->run(f); }
  std::shared_ptr<Mark> mark(const StreamOrigin&) override { return mark(); }
  std::shared_ptr<Mark> mark() override { return std::make_shared<HangingMark>(); }

 private:
  struct HangingMark final : Mark {
    bool done() const override {
      std::this_thread::sleep_for(60s);
      return false;
    }
    void hold_current() override { done(); }
  };
  std::unique_ptr<CommStream> stream_;
};

TEST(NcclDeathTest, ADeviceThatDoesNotAnswerEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto hang = [] {
    const auto nccl = loopback::make(at::kCPU, Pace::queued);
    auto api = std::make_shared<NcclApi>(*nccl.api);
    api->make_stream = [&](at::Device device) {
      return std::make_unique<HangingStream>(nccl.api->make_stream(device));
    };
    launch(2, [&](Group& bootstrap) {
      nccl_world(bootstrap, at::kCPU, {.timeout = 200ms, .api = api})->barrier();
    });
  };
  EXPECT_EXIT(hang(), testing::ExitedWithCode(static_cast<int>(ExitCode::lost_rank)),
              "rank [01], in .*: the device cpu has not answered for 0.2 s.*CUDA_MODULE_LOADING");
}

// ---------------------------------------------------------------- start

TEST(Nccl, RanksOnOneDeviceAreRefused) {
  auto api = std::make_shared<NcclApi>(*loopback::make(at::kCPU, Pace::queued).api);
  api->ranks_may_share_device = false;
  launch(3, [&](Group& bootstrap) {
    const std::vector<int> sharing{1, 2};
    EXPECT_EQ(ranks_that_share_a_gpu(bootstrap, at::kCPU, false), sharing);
    EXPECT_EQ(ranks_that_share_a_gpu(bootstrap, at::kCPU, bootstrap.rank() > 0), sharing);
    EXPECT_TRUE(ranks_that_share_a_gpu(bootstrap, at::kCPU, true).empty());
    expect_text(
        error_of([&] { nccl_world(bootstrap, at::kCPU, {.api = api}); }, ErrorKind::config),
        {"NCCL takes one rank per GPU, and ranks [1, 2] of group 'world' are on the same GPU",
         "host backend"});
  });
}

TEST(Nccl, BadOptionsAreRefused) {
  const auto nccl = loopback::make(at::kCPU, Pace::queued);
  const auto solo = solo_group();
  expect_text(error_of([&] { nccl_world(*solo, at::kCPU, {.timeout = 0ms, .api = nccl.api}); },
                       ErrorKind::config),
              {"timeout is 0 ms; it must be positive"});
  expect_text(error_of([&] { nccl_world(*solo, at::kCUDA, {.api = nccl.api}); }, ErrorKind::config),
              {"device cuda", "it takes a cpu device"});
  expect_text(
      error_of([&] { launch(2, [](Group&) {}, {.backend = Backend::nccl}); }, ErrorKind::config),
      {"backend nccl works on GPUs, and device is cpu; set device to cuda, or backend to host"});
  expect_text(error_of(
                  [&] {
                    launch(2, [](Group&) {},
                           {.device = at::Device(at::kCUDA, 63), .backend = Backend::nccl});
                  },
                  ErrorKind::device),
              {"there is no device cuda:63"});
  expect_text(error_of([&] { close_nccl(*solo); }, ErrorKind::internal),
              {"group 'solo' is not an NCCL group"});
}

// ---------------------------------------------------------------- launch

TEST(NcclLaunch, ProgramSeesAnNcclWorld) {
  const auto nccl = loopback::make(at::kCPU, Pace::queued);
  for (bool is_checked : {false, true}) {
    std::atomic<int> sum = 0;
    const auto program = [&](Group& world) {
      EXPECT_EQ(world.name(), "world");
      auto pair = world.split(world.rank() / 2, 0, "pair");
      EXPECT_EQ(pair->all_reduce(at::ones({1})).item<float>(), 2.0f);
      sum += world.all_reduce(at::full({1}, world.rank(), at::kLong)).item<int>();
    };
    launch(4, on_nccl(program, {.checked = is_checked, .backend = Backend::nccl}, nccl.api));
    EXPECT_EQ(sum, 4 * 6);
  }
  EXPECT_EQ(nccl.count->created, 2 * 8);
  EXPECT_EQ(nccl.count->destroyed, 2 * 8);
}

// The others wait for rank 1 with a deadline of minutes; they end at once, and its exception comes
// out as it was.
TEST(NcclLaunch, FaultOfOneRankStopsTheOthers) {
  struct Odd : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  for (Pace pace : {Pace::queued, Pace::polled}) {
    const auto nccl = loopback::make(at::kCPU, pace);
    std::vector<std::string> texts(3);
    std::latch ready(3);
    const auto program = [&](Group& world) {
      world.all_reduce(at::ones({1}));
      ready.arrive_and_wait();
      if (world.rank() == 1) throw Odd("rank 1 has had enough");
      texts[static_cast<size_t>(world.rank())] = error_of([&] { world.all_reduce(at::ones({1})); });
      if (world.rank() == 2) world.barrier();
    };
    try {
      launch(3, on_nccl(program, {.backend = Backend::nccl}, nccl.api));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Odd& e) {
      EXPECT_EQ(e.what(), std::string("rank 1 has had enough"));
    }
    EXPECT_EQ(texts[0], "rank 1 failed: rank 1 has had enough");
    EXPECT_EQ(texts[2], "rank 1 failed: rank 1 has had enough");
    EXPECT_EQ(nccl.count->aborted, 3);
  }
}

TEST(NcclLaunch, RanksThatShareADeviceKeepTheHostWorld) {
  for (bool is_checked : {false, true}) {
    const auto nccl = loopback::make(at::kCPU, Pace::queued);
    const auto program = [](Group& world) {
      expect_text(error_of([&] { close_nccl(world); }, ErrorKind::internal),
                  {"is not an NCCL group"});
      EXPECT_EQ(world.all_reduce(at::ones({1})).item<float>(), 2.0f);
    };
    auto one_rank_a_gpu = std::make_shared<NcclApi>(*nccl.api);
    one_rank_a_gpu->ranks_may_share_device = false;
    launch(2, on_nccl(program, {.checked = is_checked}, one_rank_a_gpu));
    EXPECT_EQ(nccl.count->created, 0);
  }
}

TEST(NcclLaunch, NcclIsTriedWhereItCanServe) {
  EXPECT_TRUE(should_try_nccl(2, {.device = at::kCUDA, .backend = Backend::nccl}));
  EXPECT_FALSE(
      should_try_nccl(2, {.device = at::kCUDA}));  // no launcher: ranks are threads on one GPU
  EXPECT_FALSE(should_try_nccl(2, {}));
  setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  EXPECT_EQ(should_try_nccl(2, {.device = at::kCUDA}), has_nccl());
  EXPECT_EQ(should_try_nccl(0, {.device = at::kCUDA}), has_nccl());
  EXPECT_FALSE(should_try_nccl(4, {.device = at::kCUDA}));  // two ranks a process
  EXPECT_FALSE(should_try_nccl(2, {.device = at::kCUDA, .backend = Backend::host}));
  EXPECT_FALSE(should_try_nccl(2, {}));
  unsetenv("OMPI_COMM_WORLD_SIZE");
}

TEST(NcclLaunch, CommandsThatStartNoRanksNeedNoLauncher) {
  setenv("WORLD_SIZE", "2", 1);  // and no RANK: launch() refuses it
  EXPECT_NO_THROW(prepare_cuda());
  unsetenv("WORLD_SIZE");
}

TEST(NcclLaunch, RanksShareAGpuWhereNcclDoes) {
  EXPECT_FALSE(takes_ranks_that_share_a_gpu(23007));
  for (const char* asked : {"1", "0"}) {
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", asked, 1);
    EXPECT_EQ(takes_ranks_that_share_a_gpu(23000), asked == std::string("1"));
    EXPECT_FALSE(takes_ranks_that_share_a_gpu(22907));
  }
  unsetenv("NCCL_MULTI_RANK_GPU_ENABLE");
}

TEST(NcclLaunch, CudaLoadsAllKernelsWhereOtherProcessesAreWaitedFor) {
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  prepare_cuda();
  EXPECT_EQ(std::getenv("CUDA_MODULE_LOADING"), nullptr);  // one process
  EXPECT_EQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), std::string("32"));
  setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  prepare_cuda();
  EXPECT_EQ(std::getenv("CUDA_MODULE_LOADING"), std::string("EAGER"));
  EXPECT_EQ(std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"), std::string("1"));
  for (const char* name :
       {"OMPI_COMM_WORLD_SIZE", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"})
    unsetenv(name);
}

TEST(NcclLaunch, PlaceOnTheMachineComesFromTheLauncher) {
  EXPECT_EQ(local_process(), 0);
  setenv("SLURM_LOCALID", "3", 1);
  EXPECT_EQ(local_process(), 3);
  unsetenv("SLURM_LOCALID");
  EXPECT_EQ(device_for(at::kCPU, 5), at::Device(at::kCPU));
  expect_text(error_of([] { device_for(at::Device(at::kCUDA, 63), 0); }, ErrorKind::device),
              {"there is no device cuda:63"});
}

TEST(Nccl, LibraryIsFoundOrItsAbsenceExplained) {
  expect_text(error_of([] { load_nccl("/nowhere/libnccl.so.2"); }, ErrorKind::config),
              {"'/nowhere/libnccl.so.2' cannot be loaded", "No such file"});
  expect_text(error_of([] { load_nccl("libm.so.6"); }, ErrorKind::config),
              {"has no ncclGetUniqueId; moesh needs NCCL 2.14 or later"});
  if (has_nccl()) {
    const auto api = installed_nccl();
    EXPECT_EQ(api->device_type, at::kCUDA);
    EXPECT_FALSE(api->ranks_may_share_device);
    EXPECT_EQ(api->error_string(NcclResult::success), std::string("no error"));
  } else {
    expect_text(error_of([] { installed_nccl(); }, ErrorKind::config),
                {"NCCL is not here", "libnccl.so.2", "nvidia/nccl/lib", "backend host"});
  }
}

}  // namespace
}  // namespace moesh::comm
