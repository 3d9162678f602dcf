// What needs a GPU: NCCL itself with the one rank that one GPU allows, its group over the loopback
// table with several ranks on that GPU, and the threads group with all ranks on it.

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "conformance.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/comm/nccl/world.h"
#include "nccl_loopback.h"

namespace moesh::comm {
namespace {

using namespace std::chrono_literals;

const at::Device kGpu(at::kCUDA, 0);
// Before CUDA begins: a stream that sleeps must not share a queue with one that computes.
const bool kIsPrepared = (prepare_cuda(), true);

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

// ---------------------------------------------------------------- conformance

class ThreadsOnOneGpu : public testing::TestWithParam<int> {};

TEST_P(ThreadsOnOneGpu, Conform) {
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    try {
      launch(GetParam(), [&](Group& world) { c.run(world, {.device = kGpu}); }, {.device = kGpu});
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, ThreadsOnOneGpu, testing::Values(1, 2, 3, 4, 8),
                         testing::PrintToStringParamName());

// `wait` orders the caller's stream behind the peers', which may be far behind their hosts, and
// memory that a rank lets go of at once is not handed out before its peers have read it.
TEST(ThreadsOnOneGpu, StreamsAreOrdered) {
  const auto run = [](Group& world) {
    const auto on_gpu = at::TensorOptions(at::kFloat).device(kGpu);
    const int next = (world.rank() + 1) % 3, last = (world.rank() + 2) % 3;
    world.open_channels({{0, 1}, {1, 2}, {2, 0}});
    for (int round = 0; round < 30; ++round) {
      auto x = at::ones({512, 512}, on_gpu);
      for (int i = 0; i < 20; ++i) x = x.matmul(at::eye(512, on_gpu));
      auto sum = world.start_all_reduce(x * (world.rank() + 1));
      auto rows = world.start_all_to_all(at::full({3 * 100, 512}, world.rank(), on_gpu), {}, {});
      auto small = world.start_all_gather(at::full({2}, world.rank(), on_gpu));
      auto received = world.start_recv({512, 512}, on_gpu, last);
      auto sent = world.start_send(x * (10 + world.rank()), next);
      x.reset();
      const auto noise = at::full({512, 512}, -1.0, on_gpu);
      EXPECT_TRUE((sum.wait() * 2).eq(12).all().item<bool>()) << round;
      const auto got = rows.wait(), few = small.wait();
      for (int r = 0; r < 3; ++r) {
        EXPECT_TRUE(got.narrow(0, 100 * r, 100).eq(r).all().item<bool>()) << round;
        EXPECT_TRUE(few.narrow(0, 2 * r, 2).eq(r).all().item<bool>()) << round;
      }
      EXPECT_TRUE(received.wait().eq(10 + last).all().item<bool>()) << round;
      sent.wait();
      EXPECT_TRUE(noise.eq(-1).all().item<bool>());
    }
  };
  launch(3, run, {.device = kGpu});
}

TEST(PacedOnOneGpu, Conforms) {
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    EXPECT_NO_THROW(launch(4, [&](Group& world) { c.run(world, {.device = kGpu}); },
                           {.device = kGpu, .links = Links{{1e-6, 1e9}, {5e-6, 1e8}, 2}}));
  }
}

// 4 MB at 10 MB/s: the host goes on at once, what the stream is given before the wait runs while
// rows travel, and what it is given after it when they have come.
TEST(PacedOnOneGpu, TheStreamWaitsAndNotTheHost) {
  const auto run = [](Group& world) {
    const auto on_gpu = at::TensorOptions(at::kFloat).device(kGpu);
    const auto seconds_since = [](auto begin) {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    const auto await_stream = [] {
      c10::impl::VirtualGuardImpl(kGpu.type()).getStream(kGpu).synchronize();
    };
    const at::Tensor x = at::full({2'000'000}, world.rank(), on_gpu);
    // Kernels are loaded: one that is loaded later waits for those that run, also if they sleep.
    world.all_reduce((at::ones({1}, on_gpu) * 2 + 1).narrow(0, 0, 1).clone());
    await_stream();
    world.barrier();
    const auto begin = std::chrono::steady_clock::now();
    auto moving = world.start_all_to_all(x, {}, {});
    const at::Tensor beside = at::ones({1000}, on_gpu) * 2;
    await_stream();
    EXPECT_LT(seconds_since(begin), 0.3);
    EXPECT_EQ(beside[0].item<float>(), 2);
    const at::Tensor got = moving.wait() + 1;
    EXPECT_LT(seconds_since(begin), 0.3);
    await_stream();
    EXPECT_GE(seconds_since(begin), 0.4);
    EXPECT_EQ(got[1'000'000].item<float>(), 2);
  };
  launch(2, run, {.device = kGpu, .links = Links{{20e-6, 1e7}, {}, 0}});
}

class LoopbackOnOneGpu : public testing::TestWithParam<int> {};

TEST_P(LoopbackOnOneGpu, Conforms) {
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    const auto nccl = loopback::make(at::kCUDA, loopback::Pace::polled);
    try {
      const auto run = [&](Group& bootstrap) {
        auto world = nccl_world(bootstrap, kGpu, {.timeout = 60s, .api = nccl.api});
        c.run(*world, {.device = kGpu});
      };
      launch(GetParam(), run, {.device = kGpu, .backend = Backend::host});
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
    EXPECT_GE(nccl.count->created, GetParam());
    EXPECT_EQ(nccl.count->destroyed, nccl.count->created);
    EXPECT_EQ(nccl.count->aborted, 0);
  }
}
INSTANTIATE_TEST_SUITE_P(Ranks, LoopbackOnOneGpu, testing::Values(1, 2, 4),
                         testing::PrintToStringParamName());

TEST(LoopbackOnOneGpu, DigestIsThatOfTheCpu) {
  std::uint64_t on_cpu = 0, on_gpu = 0, of_nccl = 0;
  const auto nccl = loopback::make(at::kCUDA, loopback::Pace::polled);
  launch(4, [&](Group& world) {
    const auto value = conformance::digest(world, {}, 3);
    if (world.rank() == 0) on_cpu = value;
  });
  const auto run = [&](Group& world) {
    const auto value = conformance::digest(world, {.device = kGpu}, 3);
    const auto again =
        conformance::digest(*nccl_world(world, kGpu, {.api = nccl.api}), {.device = kGpu}, 3);
    if (world.rank() == 0) on_gpu = value, of_nccl = again;
  };
  launch(4, run, {.device = kGpu});
  EXPECT_NE(on_cpu, 0u);
  EXPECT_EQ(on_gpu, on_cpu);
  EXPECT_EQ(of_nccl, on_cpu);
}

// `wait` orders the caller's stream behind the collective, and memory that the caller lets go of at
// once is not handed out before the collective has read it.
TEST(LoopbackOnOneGpu, StreamsAreOrdered) {
  const auto nccl = loopback::make(at::kCUDA, loopback::Pace::polled);
  const auto run = [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, kGpu, {.timeout = 60s, .api = nccl.api});
    const auto on_gpu = at::TensorOptions(at::kFloat).device(kGpu);
    for (int round = 0; round < 20; ++round) {
      // A long chain on the current stream comes before the collective...
      auto x = at::ones({512, 512}, on_gpu);
      for (int i = 0; i < 20; ++i) x = x.matmul(at::eye(512, on_gpu));
      auto handle = world->start_all_reduce(x * (world->rank() + 1));
      const auto noise = at::full({512, 512}, -1.0, on_gpu);
      // ... and what follows the wait sees its result.
      const auto y = handle.wait() * 2;
      EXPECT_TRUE(y.eq(6).all().item<bool>()) << round;
      EXPECT_TRUE(noise.eq(-1).all().item<bool>());
    }
  };
  launch(2, run, {.device = kGpu});
}

TEST(LoopbackOnOneGpu, RankThatNeverComesIsMissedAtTheDeadline) {
  const auto nccl = loopback::make(at::kCUDA, loopback::Pace::polled);
  const auto run = [&](Group& bootstrap) {
    auto world = nccl_world(bootstrap, kGpu, {.timeout = 500ms, .api = nccl.api});
    const auto x = at::ones({2, 3}, at::TensorOptions(at::kFloat).device(kGpu));
    EXPECT_EQ(world->control_device(), kGpu);
    expect_text(error_of([&] { world->all_reduce(x.cpu()); }),
                {"the tensor is on cpu, and this NCCL group works on cuda:0"});
    if (world->rank() == 0) {
      const auto first = error_of([&] { world->all_reduce(x); });
      expect_text(first,
                  {"rank 0 waited in all_reduce(sum, float32 [2, 3]), operation 0 of group 'world'",
                   "within 0.5 s"});
      EXPECT_EQ(error_of([&] { world->barrier(); }), first);
    }
    bootstrap.barrier();
  };
  launch(2, run, {.device = kGpu});
  EXPECT_EQ(nccl.count->destroyed + nccl.count->aborted, 2);
}

// ---------------------------------------------------------------- NCCL itself

// Asks until the communicator takes calls again.
void settle(const NcclApi& nccl, NcclComm comm, NcclResult result) {
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (result == NcclResult::in_progress) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::sleep_for(100us);
    NcclResult state = NcclResult::success;
    result = nccl.get_async_error(comm, &state);
    if (result == NcclResult::success) result = state;
  }
  ASSERT_EQ(result, NcclResult::success)
      << nccl.error_string(result) << ": " << nccl.last_error(comm);
}

NcclComm comm_of_one(const NcclApi& nccl) {
  NcclUniqueId id{};
  EXPECT_EQ(nccl.get_unique_id(&id), NcclResult::success);
  NcclComm comm = nullptr;
  const NcclResult result = nccl.comm_init_rank(&comm, 1, id, 0);
  settle(nccl, comm, result);
  return comm;
}

TEST(RealNccl, EveryCallOfTheTable) {
  ASSERT_TRUE(has_nccl());
  const NcclApi& nccl = *installed_nccl();
  use_device(kGpu);
  NcclComm comm = comm_of_one(nccl);
  ASSERT_NE(comm, nullptr);
  DeviceStream stream(kGpu);

  const std::pair<at::ScalarType, NcclType> types[] = {
      {at::kDouble, NcclType::float64},    {at::kFloat, NcclType::float32},
      {at::kBFloat16, NcclType::bfloat16}, {at::kLong, NcclType::int64},
      {at::kInt, NcclType::int32},         {at::kBool, NcclType::uint8}};
  for (const auto& [dtype, type] : types) {
    SCOPED_TRACE(dtype);
    const at::Tensor x =
        at::arange(1000, at::TensorOptions(at::kLong).device(kGpu)).remainder(7).to(dtype);
    const auto n = static_cast<size_t>(x.numel());
    const auto check = [&](const char* what, const std::function<NcclResult(void* out)>& issue) {
      SCOPED_TRACE(what);
      const at::Tensor y = at::zeros_like(x);
      const auto origin = stream.here();
      stream.follow(*origin);
      settle(nccl, comm, issue(y.data_ptr()));
      stream.mark(*origin)->hold_current();
      EXPECT_TRUE(y.equal(x));
    };
    const void* in = x.const_data_ptr();
    void* s = stream.handle();
    ASSERT_NE(s, nullptr);
    for (auto op : {NcclReduce::sum, NcclReduce::max, NcclReduce::min}) {
      check("all_reduce",
            [&, t = type](void* out) { return nccl.all_reduce(in, out, n, t, op, comm, s); });
      check("reduce_scatter",
            [&, t = type](void* out) { return nccl.reduce_scatter(in, out, n, t, op, comm, s); });
    }
    check("all_gather",
          [&, t = type](void* out) { return nccl.all_gather(in, out, n, t, comm, s); });
    check("broadcast",
          [&, t = type](void* out) { return nccl.broadcast(in, out, n, t, 0, comm, s); });
    check("send and recv in a group", [&, t = type](void* out) {
      EXPECT_EQ(nccl.group_start(), NcclResult::success);
      EXPECT_EQ(nccl.send(in, n, t, 0, comm, s), NcclResult::success);
      EXPECT_EQ(nccl.recv(out, n, t, 0, comm, s), NcclResult::success);
      return nccl.group_end();
    });
  }
  EXPECT_EQ(nccl.error_string(NcclResult::success), std::string("no error"));
  settle(nccl, comm, nccl.comm_finalize(comm));
  EXPECT_EQ(nccl.comm_destroy(comm), NcclResult::success);

  comm = comm_of_one(nccl);
  EXPECT_EQ(nccl.comm_abort(comm), NcclResult::success);
}

// The calls that groups make, past the short cut for one rank: enqueue, wait, finish, several
// communicators, close.
TEST(RealNccl, WorldOfOneRank) {
  use_device(kGpu);
  NcclWorld world(installed_nccl(), kGpu, 0, 60s, false);
  const auto on_gpu = at::TensorOptions(at::kFloat).device(kGpu);
  for (const char* name : {"world", "tp"}) {
    const auto info = std::make_shared<const NcclGroupInfo>(NcclGroupInfo{name, {0}});
    NcclComm comm = world.join(world.new_id(), 0, info);
    for (int round = 0; round < 50; ++round) {
      const at::Tensor x = at::full({1 << 16}, round, on_gpu), y = at::empty_like(x);
      const auto ticket = world.enqueue(
          comm, Call::of(Collective::all_reduce, round, x), info, {x, y},
          [&](const NcclApi& api, NcclComm c, void* stream) {
            return api.all_reduce(x.const_data_ptr(), y.data_ptr(), 1 << 16, NcclType::float32,
                                  NcclReduce::sum, c, stream);
          },
          [y] { y.add_(1); });
      if (round % 2) world.finish(*ticket);
      world.wait(*ticket);
      EXPECT_TRUE(ticket->keep.empty());
      EXPECT_TRUE(y.eq(round + 1).all().item<bool>()) << round;
    }
  }
  world.close();
  expect_text(error_of([&] { world.throw_if_stopped(); }), {"this NCCL world has ended"});
}

TEST(RealNccl, GroupOfOneRankConforms) {
  for (const auto& c : conformance::cases()) {
    SCOPED_TRACE(c.name);
    try {
      launch(1, [&](Group& world) { c.run(world, {.device = kGpu}); },
             {.device = at::kCUDA, .backend = Backend::nccl});
    } catch (const std::exception& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

// NCCL waits for the second rank, the deadline ends it, and NCCL can be used again.
TEST(RealNccl, PeerThatNeverComesIsMissedAtTheDeadline) {
  use_device(kGpu);
  {
    NcclWorld world(installed_nccl(), kGpu, 0, 2s, false);
    const auto pair = std::make_shared<const NcclGroupInfo>(NcclGroupInfo{"pair", {0, 1}});
    const auto text = error_of([&] { world.join(world.new_id(), 0, pair); });
    expect_text(text, {"rank 0 waited in the start of group 'pair'", "within 2 s", "ranks [0, 1]"});
  }
  NcclWorld world(installed_nccl(), kGpu, 0, 60s, false);
  const auto solo = std::make_shared<const NcclGroupInfo>(NcclGroupInfo{"solo", {0}});
  EXPECT_NE(world.join(world.new_id(), 0, solo), nullptr);
  world.close();
}

TEST(RealNccl, TwoRanksOnOneGpuAreRefused) {
  const auto text =
      error_of([] { launch(2, [](Group&) {}, {.device = kGpu, .backend = Backend::nccl}); },
               ErrorKind::config);
  expect_text(text, {"NCCL takes one rank per GPU, and ranks [1] of group 'world'", "cuda:0",
                     "host backend"});
}

}  // namespace
}  // namespace moesh::comm
