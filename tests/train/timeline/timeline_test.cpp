#include "moesh/base/timeline.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <sstream>
#include <thread>

#include "moesh/base/log.h"
#include "moesh/base/this_thread.h"
#include "moesh/base/turns.h"
#include "moesh/comm/launch.h"
#include "moesh/train/timeline/costs.h"
#include "moesh/train/timeline/record.h"
#include "moesh/train/timeline/trace.h"
#include "tests/comm/trace.h"
#include "tests/support.h"

namespace moesh::train {
namespace {

// No slice begins in one of its lane and ends outside of it.
void expect_nested(const TimelineRecord& t) {
  std::map<std::int64_t, std::vector<const Slice*>> lanes;
  std::int64_t last = 0;
  for (const Slice& s : t.slices) {
    EXPECT_LE(last, s.begin);
    EXPECT_LE(s.begin, s.end);
    last = s.begin;
    auto& open = lanes[s.lane];
    while (!open.empty() && open.back()->end <= s.begin) open.pop_back();
    if (!open.empty()) {
      EXPECT_LE(s.end, open.back()->end)
          << t.names[static_cast<size_t>(s.name)] << " ends after "
          << t.names[static_cast<size_t>(open.back()->name)] << ", in which it began";
    }
    open.push_back(&s);
  }
}

std::vector<std::string> names_of(const TimelineRecord& t, SliceKind kind) {
  std::vector<std::string> names;
  for (const Slice& s : t.slices)
    if (s.kind == kind) names.push_back(t.names[static_cast<size_t>(s.name)]);
  return names;
}

TEST(Timeline, HasTheCollectivesOfTheTrace) {
  for (const bool checked : {false, true}) {
    const auto f = [&](comm::Group& world) {
      const auto pair = world.split(world.rank() / 2, world.rank(), "pair");
      Timeline timeline;
      const RecordCollectives collectives(timeline);
      const comm::Trace trace;
      {
        const InSection section(Section::backward);
        auto first = pair->start_reduce_scatter(at::ones({6, 3}), {4, 2});
        auto second = world.start_all_gather(at::ones({1}));
        world.all_reduce(at::ones({5000}));
        second.wait();
        first.wait();
      }
      world.all_to_all(at::ones({4}), {}, {});
      pair->broadcast(at::ones({2}), 1);
      world.barrier();
      world.open_channels({{0, 3}});
      if (world.rank() == 0) world.start_send(at::ones({9}), 3).wait();
      if (world.rank() == 3) world.start_recv({9}, at::kFloat, 0).wait();
      {
        const auto dropped = world.start_all_reduce(at::ones({7}));
      }
      const TimelineRecord t = timeline.take();
      expect_nested(t);
      ASSERT_EQ(t.collectives.size(), trace.entries().size());
      for (std::size_t i = 0; i < t.collectives.size(); ++i) {
        const CollectiveSpan& c = t.collectives[i];
        const comm::TraceEntry& e = trace.entries()[i];
        const TimelineGroup& g = t.groups[static_cast<size_t>(c.group)];
        EXPECT_EQ(t.names[static_cast<size_t>(c.op)], to_string(e.op));
        EXPECT_EQ(g.name, e.group);
        const bool is_message = e.op == comm::Collective::send || e.op == comm::Collective::recv;
        if (is_message) {
          EXPECT_EQ(g.members, (std::vector<int>{0, 3}));
        } else {
          EXPECT_EQ(g.members.size(), e.group == "pair" ? 2u : 4u);
        }
        EXPECT_EQ(c.bytes, e.bytes);
        EXPECT_LE(c.begin, c.wait_begin);
        EXPECT_LE(c.wait_begin, c.end);
      }
      // What goes on beside other work has a slice for the call and one for the wait; the others
      // have one.
      const auto slices = names_of(t, SliceKind::collective);
      EXPECT_EQ(std::count(slices.begin(), slices.end(), "reduce_scatter pair"), 2);
      EXPECT_EQ(std::count(slices.begin(), slices.end(), "all_reduce world"), 2);
      EXPECT_EQ(std::count(slices.begin(), slices.end(), "barrier world"), 1);
    };
    comm::launch(4, f, {.checked = checked});
  }
}

TEST(Timeline, ShowsOperatorsOfForwardAndBackwardInTheirSections) {
  comm::launch(2, [](comm::Group&) {
    Timeline timeline;
    const RecordOperators operators;
    at::Tensor w = at::ones({4, 4}).requires_grad_();
    {
      const InSection section(Section::forward);
      RECORD_USER_SCOPE("block 7");
      w = w.matmul(w);
    }
    {
      const InSection section(Section::backward);
      w.sum().backward();
    }
    std::thread([] { at::ones({3}).cos_(); }).join();  // that of nobody
    const TimelineRecord t = timeline.take();
    expect_nested(t);
    EXPECT_EQ(names_of(t, SliceKind::section), (std::vector<std::string>{"forward", "backward"}));
    EXPECT_EQ(names_of(t, SliceKind::scope), (std::vector<std::string>{"block 7"}));
    const auto ops = names_of(t, SliceKind::op);
    EXPECT_EQ(std::count(ops.begin(), ops.end(), "aten::mm"), 3);  // and two in backward
    EXPECT_EQ(std::count(ops.begin(), ops.end(), "MmBackward0"), 1);
    EXPECT_EQ(std::count(ops.begin(), ops.end(), "aten::cos_"), 0);
  });
}

// What one piece of work does in its turns is in its lane; while it waits, the turn is the other's.
TEST(Timeline, PiecesOfWorkThatTakeTurnsHaveLanes) {
  comm::launch(2, [](comm::Group& world) {
    RankRecord record = here_and_now();
    Timeline timeline;
    const RecordCollectives collectives(timeline);
    const RecordOperators operators;
    auto& observers = comm::thread_observers();
    const at::ThreadLocalState torch;
    const auto work = [&](int lane) {
      return [&, lane] {
        const at::ThreadLocalStateGuard same(torch);
        const auto same_observers = comm::use_observers_of(observers);
        RECORD_USER_SCOPE(lane == 0 ? "first" : "second");
        auto sum = world.start_all_reduce(at::ones({2 + lane}));
        next_turn();
        at::ones({2, 2}).mm(at::ones({2, 2}));
        sum.wait();
        if (lane == 1) next_turn(), at::ones({2, 2}).mm(at::ones({2, 2}));
      };
    };
    const auto step = timeline.open(SliceKind::step, "step 1");
    take_turns({work(0), work(1)});
    timeline.close(step);
    record.timeline = timeline.take();
    const TimelineRecord& t = record.timeline;
    expect_nested(t);
    std::map<std::string, std::vector<std::int64_t>> lanes;
    for (const Slice& s : t.slices)
      if (s.kind != SliceKind::collective)
        lanes[t.names[static_cast<size_t>(s.name)]].push_back(s.lane);
    EXPECT_EQ(lanes["first"], (std::vector<std::int64_t>{0}));
    EXPECT_EQ(lanes["second"], (std::vector<std::int64_t>{1}));
    EXPECT_EQ(lanes["aten::mm"], (std::vector<std::int64_t>{0, 1, 1}));
    // The first waits once more, for the end of the other one.
    EXPECT_EQ(lanes["turn of the other"], (std::vector<std::int64_t>{0, 1, 0, 1}));
    ASSERT_EQ(t.collectives.size(), 2u);
    for (const std::int64_t lane : {0, 1}) {
      const CollectiveSpan& c = t.collectives[static_cast<size_t>(lane)];
      EXPECT_EQ(c.lane, lane);
      EXPECT_EQ(t.names[static_cast<size_t>(c.scope)], lane == 0 ? "first" : "second");
    }
    const std::vector<Wait> waits(2, Wait{.slowest = 0});
    const std::string text = trace_json({record}, {waits}, {});
    expect_parts(text, {R"("tid":1,"name":"thread_name","args":{"name":"host, lane 1"})"});
    const TraceCosts costs = costs_of({record}, {waits});
    double sum = 0;
    for (const Cost& c : costs.costs) sum += c.nanoseconds;
    EXPECT_NEAR(sum, costs.step_nanoseconds, 1);
  });
}

TEST(Timeline, NothingIsRecordedWhereNobodyAsks) {
  comm::launch(2, [](comm::Group& world) {
    EXPECT_EQ(Timeline::current(), nullptr);
    auto before = world.start_all_reduce(at::ones({2}));
    Timeline timeline;
    const RecordCollectives collectives(timeline);
    {
      const comm::ObserverPause quiet;
      world.all_reduce(at::ones({2}));
    }
    before.wait();
    const TimelineRecord t = timeline.take();
    EXPECT_TRUE(t.collectives.empty());
    EXPECT_TRUE(names_of(t, SliceKind::collective).empty());
  });
}

// Rank 2 calls when all others have: they have waited for it, in whatever order they came.
TEST(Waits, NameTheRankThatCameLast) {
  std::atomic<int> num_called = 0;
  comm::launch(4, [&](comm::Group& world) {
    std::optional<Timeline> timeline(std::in_place);
    std::optional<RecordCollectives> collectives(*timeline);
    RankRecord mine = here_and_now();
    for (int i = 0; i < 3; ++i) {
      while (world.rank() == 2 && num_called < 3 * (i + 1)) std::this_thread::yield();
      auto handle = world.start_all_reduce(at::ones({2}));
      if (world.rank() != 2) ++num_called;
      handle.wait();
    }
    mine.timeline = timeline->take();
    collectives.reset();
    timeline.reset();
    const auto records = gather(world, mine);
    ASSERT_EQ(records.size(), world.rank() == 0 ? 4u : 0u);
    if (world.rank() != 0) return;
    const auto waits = find_waits(records);
    for (std::size_t r = 0; r < 4; ++r) {
      ASSERT_EQ(waits[r].size(), 3u);
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(waits[r][i].slowest, 2);
        EXPECT_EQ(waits[r][i].unknown, "");
        const CollectiveSpan& c = records[r].timeline.collectives[i];
        EXPECT_LE(waits[r][i].nanoseconds, c.end - c.wait_begin);
        if (r == 2) {
          EXPECT_EQ(waits[r][i].nanoseconds, 0);
        }
      }
    }
  });
}

// Two ranks, a step of 100 ns each: an operator in an operator, and an all_reduce to which rank 1
// comes at 60.
std::vector<RankRecord> two_ranks() {
  std::vector<RankRecord> records(2);
  for (int r = 0; r < 2; ++r) {
    RankRecord& record = records[static_cast<size_t>(r)];
    const std::int64_t call = r == 0 ? 40 : 60;
    record.timeline = {
        .names = {"step 1", "forward", "aten::linear", "aten::mm", "all_reduce", "all_reduce tp"},
        .groups = {{"tp", {0, 1}}},
        .slices = {{SliceKind::step, 0, 0, 100},
                   {SliceKind::section, 1, 5, 95},
                   {SliceKind::op, 2, 10, 30},
                   {SliceKind::op, 3, 12, 28},
                   {SliceKind::collective, 5, call, 90, 0},
                   {SliceKind::op, 3, 80, 85}},  // within the collective, and part of it
        .collectives = {
            {.op = 4, .group = 0, .bytes = 8, .begin = call, .wait_begin = call + 1, .end = 90}}};
  }
  return records;
}

TEST(Waits, AreFromTheWaitToTheLastCall) {
  auto records = two_ranks();
  const auto waits = find_waits(records);
  EXPECT_EQ(waits[0][0].nanoseconds, 60 - 41);
  EXPECT_EQ(waits[1][0].nanoseconds, 0);
  EXPECT_EQ(waits[0][0].slowest, 1);
}

TEST(Waits, AreThoseOfBothEndsOfAMessage) {
  auto records = two_ranks();
  records[0].timeline.names[4] = "send", records[1].timeline.names[4] = "recv";
  const auto waits = find_waits(records);
  EXPECT_EQ(waits[0][0].nanoseconds, 60 - 41);
  EXPECT_EQ(waits[0][0].slowest, 1);
}

TEST(Waits, AreUnknownWhereNothingCanBeTold) {
  const auto unknown = [](auto change) {
    auto records = two_ranks();
    change(records);
    return find_waits(records)[0][0].unknown;
  };
  EXPECT_EQ(unknown([](auto&) {}), "");
  EXPECT_EQ(unknown([](auto& r) { r[1].machine = 7; }),
            "ranks are on machines with different clocks");
  EXPECT_EQ(unknown([](auto& r) {
              for (RankRecord& record : r) record.timeline.groups[0].meets_on_host = false;
            }),
            "ranks meet on the device: see its kernels");
  EXPECT_EQ(unknown([](auto& r) { r[1].timeline.collectives.clear(); }),
            "not every rank of the group makes this call");
}

TEST(TraceCosts, AddUpToTheStep) {
  const auto records = two_ranks();
  const TraceCosts costs = costs_of(records, find_waits(records));
  EXPECT_EQ(costs.num_steps, 1);
  EXPECT_EQ(costs.step_nanoseconds, 100);
  EXPECT_FALSE(costs.of_device);
  std::map<std::string, double> of;
  double sum = 0;
  for (const Cost& c : costs.costs) of[c.what] = c.nanoseconds, sum += c.nanoseconds;
  EXPECT_EQ(sum, 100);
  EXPECT_EQ(of.at("aten::mm"), 16);
  EXPECT_EQ(of.at("aten::linear"), 4);
  EXPECT_EQ(of.at("waiting in all_reduce on tp (rank 1 last in 2 of 2)"), 19 / 2.0);
  EXPECT_EQ(of.at("all_reduce on tp"), (50 + 30 - 19) / 2.0);
  EXPECT_EQ(of.at("host, between the operators of forward"), (20 + 40) / 2.0);
  EXPECT_EQ(of.at("host, between the operators of other"), 10);
  EXPECT_EQ(costs.costs[0].what, "all_reduce on tp");
  const std::string text = describe(costs, 2);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;
  expect_parts(text, {"30.5 %  all_reduce on tp"});
}

TEST(TraceCosts, AreThoseOfTheDeviceWhereItWorks) {
  auto records = two_ranks();
  records[0].kernels = {{"void gemm<float>", 0, 7, 0, 10, 50},
                        {"void gemm<float>", 0, 8, 0, 40, 60}};
  records[1].kernels = {{"copy", 0, 7, 1, 0, 20}, {"copy", 0, 7, 1, 200, 300}};  // in no step
  const TraceCosts costs = costs_of(records, find_waits(records));
  EXPECT_TRUE(costs.of_device);
  ASSERT_EQ(costs.costs.size(), 3u);
  EXPECT_EQ(costs.costs[0].what, "no kernel");
  EXPECT_EQ(costs.costs[0].nanoseconds, (50 + 80) / 2.0);
  EXPECT_EQ(costs.costs[1].what, "gemm<float>");
  EXPECT_EQ(costs.costs[1].nanoseconds, 50 / 2.0);  // from 10 to 60, however many
  EXPECT_EQ(costs.costs[1].calls, 2 / 2.0);
  EXPECT_EQ(costs.costs[2].nanoseconds, 20 / 2.0);
  EXPECT_EQ(costs.together_nanoseconds, 10 / 2.0);
}

// A kernel that takes the time of a link lets the device idle; and so does a host that learns only
// then what comes next.
TEST(TraceCosts, TellForWhatTheDeviceWaits) {
  auto records = two_ranks();
  records[0].kernels = {{"gemm", 0, 7, 0, 10, 30, 0},
                        {"moesh::comm::cuda::sleep_on_link(long)", 0, 9, 0, 30, 90, 0},
                        {"gemm", 0, 7, 0, 70, 80, 1}};
  TimelineRecord& t = records[0].timeline;
  t.names.emplace_back(kReadCounts);
  const auto name = static_cast<std::int64_t>(t.names.size()) - 1;
  t.slices.push_back({.kind = SliceKind::scope, .name = name, .begin = 96, .end = 98});
  t.slices.push_back({.kind = SliceKind::scope, .name = name, .begin = 20, .end = 35, .lane = 1});
  const auto idle = idle_after_counts(records[0]);
  EXPECT_EQ(idle, (std::map<std::size_t, std::int64_t>{{t.slices.size() - 1, 40}}));
  const TraceCosts costs = costs_of(records, find_waits(records));
  std::map<std::string, double> of;
  for (const Cost& c : costs.costs) of[c.what] = c.nanoseconds;
  EXPECT_EQ(of.at("gemm"), 30 / 2.0);
  EXPECT_EQ(of.at("no kernel"), (70 + 100) / 2.0);
  EXPECT_EQ(costs.after_counts_nanoseconds, 40 / 2.0);
  expect_parts(describe(costs), {"after the host had read counts"});
  expect_parts(trace_json(records, find_waits(records), {}),
               {R"("args":{"gpu_idle_us":0.040})", R"("name":"GPU 0 stream 7, lane 1")",
                R"("tid":1,"name":"thread_name","args":{"name":"host, lane 1"})"});
}

// Three streams at once, kernels over the ends of the step, and two that meet in one moment: what
// is printed is never more than the step.
TEST(TraceCosts, OfKernelsAtTheSameTimeAddUpToTheStep) {
  auto records = two_ranks();
  records[0].kernels = {{"before", 0, 7, 0, -50, 10}, {"gemm", 0, 7, 0, 10, 70},
                        {"nccl", 0, 8, 0, 10, 40},    {"copy", 0, 9, 0, 20, 26},
                        {"nothing", 0, 9, 0, 30, 30}, {"after", 0, 7, 0, 90, 400}};
  records[1].kernels = {{"gemm", 1, 7, 1, 0, 100}};
  const TraceCosts costs = costs_of(records, find_waits(records));
  std::map<std::string, double> of;
  double sum = 0;
  for (const Cost& c : costs.costs) of[c.what] = c.nanoseconds, sum += c.nanoseconds;
  EXPECT_EQ(sum, 100);
  EXPECT_EQ(of.at("before"), 10 / 2.0);
  EXPECT_EQ(of.at("nccl"), (24 / 2.0 + 6 / 3.0) / 2);
  EXPECT_EQ(of.at("copy"), 6 / 3.0 / 2);
  EXPECT_EQ(of.at("gemm"), (24 / 2.0 + 6 / 3.0 + 30 + 100) / 2);
  EXPECT_EQ(of.at("after"), 10 / 2.0);
  EXPECT_EQ(of.at("no kernel"), 20 / 2.0);
  EXPECT_EQ(costs.together_nanoseconds, 30 / 2.0);
  expect_parts(describe(costs), {"several kernels of a rank ran at once"});
}

// The kernels of LibTorch have long names, in which what tells them apart is not in front.
TEST(TraceCosts, TellKernelsApartThatBeginAlike) {
  auto records = two_ranks();
  const std::string front = "void at::native::vectorized_elementwise_kernel<4, at::native::";
  const std::string end = ", std::array<char*, 3ul> >(int, std::array<char*, 3ul>)";
  records[0].kernels = {{front + "CUDAFunctor_add<float>" + end, 0, 7, 0, 0, 10},
                        {front + "(anonymous namespace)::silu<float>" + end, 0, 7, 0, 20, 25},
                        {"Memcpy DtoH (Device -> Pinned)", 0, 7, 0, 30, 34},
                        {"void f<(g)1>(int)" + std::string(200, 'x'), 0, 7, 0, 40, 43}};
  const TraceCosts costs = costs_of(records, find_waits(records));
  ASSERT_EQ(costs.costs.size(), 5u);
  const std::string kept = "vectorized_elementwise_kernel<4, ", last = ", std::array<char*, 3ul> >";
  EXPECT_EQ(costs.costs[1].what, kept + "CUDAFunctor_add<float>" + last);
  EXPECT_EQ(costs.costs[2].what, kept + "silu<float>" + last);
  EXPECT_EQ(costs.costs[3].what, "Memcpy DtoH (Device -> Pinned)");
  EXPECT_EQ(costs.costs[4].what, "f<(g)1>");
  const std::string text = describe(costs);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_NE(text.find("CUDAFunctor_add"), std::string::npos) << text;
}

using Kind = ProfilerEvent::EventSource;

// Threads 10 and 20 work for ranks 0 and 1, and 21, that of a channel, for rank 1, too.
RankLane work_of(std::int64_t thread) {
  return {.rank = thread == 10 ? 0 : thread == 20 || thread == 21 ? 1 : -1, .lane = thread == 21};
}

std::map<std::string, std::int64_t> ranks_of(const std::vector<ProfilerEvent>& events) {
  std::map<std::string, std::int64_t> ranks;
  for (const KernelSpan& k : kernels_of(events, work_of)) ranks[k.name] = k.rank;
  return ranks;
}

TEST(Kernels, AreOfTheLaneWhoseThreadLaunchedThem) {
  const auto kernels = kernels_of({{.kind = Kind::launch, .place = 20, .correlation = 1},
                                   {.kind = Kind::launch, .place = 21, .correlation = 2},
                                   {Kind::kernel, "of the first", 0, 7, 1, 0, 10, 20},
                                   {Kind::kernel, "of the second", 0, 7, 2, 0, 20, 30}},
                                  work_of);
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_EQ(kernels[0].lane, 0);
  EXPECT_EQ(kernels[1].lane, 1);
}

TEST(Kernels, AreOfTheRankWhoseThreadLaunchedThem) {
  const auto ranks = ranks_of({{.kind = Kind::op, .place = 10, .correlation = 1},
                               {.kind = Kind::op, .place = 20, .correlation = 2},
                               // The same numbers as those of the ops, and none of their own.
                               {.kind = Kind::launch, .place = 21, .correlation = 1},
                               {.kind = Kind::launch, .place = 99, .correlation = 3},
                               {Kind::kernel, "of an op", 0, 7, 8, 1, 10, 20},
                               {Kind::kernel, "of another op", 0, 7, 9, 2, 20, 30},
                               {Kind::kernel, "of a channel", 0, 8, 1, 0, 30, 40},
                               {Kind::kernel, "of a stranger", 0, 9, 3, 0, 40, 50}});
  EXPECT_EQ(
      ranks,
      (std::map<std::string, std::int64_t>{
          {"of an op", 0}, {"of another op", 1}, {"of a channel", 1}, {"of a stranger", -1}}));
}

// Two GPUs number their streams alike.
TEST(Kernels, WithoutALaunchAreOfTheRankThatHasTheStreamOfTheirDevice) {
  const auto ranks = ranks_of({{.kind = Kind::launch, .place = 10, .correlation = 1},
                               {.kind = Kind::launch, .place = 20, .correlation = 2},
                               {Kind::kernel, "a", 0, 7, 1, 0, 0, 1},
                               {Kind::kernel, "b", 1, 7, 2, 0, 0, 1},
                               {Kind::kernel, "beside a", 0, 7, 0, 0, 1, 2},
                               {Kind::kernel, "beside b", 1, 7, 0, 0, 1, 2},
                               {Kind::kernel, "a on a stream of both", 0, 8, 1, 0, 2, 3},
                               {Kind::kernel, "b on a stream of both", 0, 8, 2, 0, 3, 4},
                               {Kind::kernel, "of either", 0, 8, 0, 0, 4, 5}});
  EXPECT_EQ(ranks.at("beside a"), 0);
  EXPECT_EQ(ranks.at("beside b"), 1);
  EXPECT_EQ(ranks.at("of either"), -1);
}

TEST(RankThreads, AreThoseOfARankAndOfWhoHelpsIt) {
  const auto number = [] { return static_cast<std::int64_t>(::syscall(SYS_gettid)); };
  std::vector<std::int64_t> ranks(2), helpers(2);
  std::optional<KeepRankThreads> keep(std::in_place);
  comm::launch(2, [&](comm::Group& world) {
    const auto r = static_cast<size_t>(world.rank());
    ranks[r] = number();
    std::thread([&] {
      set_log_rank(world.rank());
      helpers[r] = number();
      const auto low = static_cast<std::int32_t>(reinterpret_cast<std::uintptr_t>(pthread_self()));
      EXPECT_EQ(rank_of_thread(low).rank, world.rank());
    }).join();
    world.barrier();
  });
  for (const int r : {0, 1}) {
    EXPECT_EQ(rank_of_thread(ranks[static_cast<size_t>(r)]), (RankLane{r, 0}));
    EXPECT_EQ(rank_of_thread(helpers[static_cast<size_t>(r)]), (RankLane{r, 0}));
  }
  keep.reset();
  EXPECT_EQ(rank_of_thread(ranks[1]).rank, -1);  // the system may give its number to another thread
}

TEST(Gather, GivesKernelsToTheRankThatLaunchedThem) {
  comm::launch(3, [](comm::Group& world) {
    RankRecord mine = here_and_now();
    if (world.rank() == 1)
      mine.kernels = {{"a", 0, 7, 0, 1, 2}, {"b", 0, 7, 2, 2, 3}, {"c", 0, 7, -1, 3, 4}};
    const auto records = gather(world, mine);
    if (world.rank() != 0) return;
    ASSERT_EQ(records[0].kernels.size(), 1u);
    EXPECT_EQ(records[0].kernels[0].name, "a");
    ASSERT_EQ(records[1].kernels.size(), 1u);
    EXPECT_EQ(records[1].kernels[0].name, "c");
    EXPECT_EQ(records[2].kernels[0].name, "b");
  });
}

TEST(Gather, WordsAreTheRecord) {
  auto record = two_ranks()[0];
  record.kernels = {{"a kernel with a longer name", 3, 7, 1, 2, 3}};
  const auto words = to_words(record);
  EXPECT_EQ(to_words(from_words(words)), words);
  const RankRecord read = from_words(words);
  EXPECT_EQ(trace_json({read}, {{Wait{}}}, {}), trace_json({record}, {{Wait{}}}, {}));
  for (std::size_t n = 0; n < words.size(); ++n)
    error_of([&] { from_words({words.begin(), words.begin() + static_cast<std::ptrdiff_t>(n)}); },
             ErrorKind::internal);
  auto longer = words;
  longer.push_back(0);
  error_of([&] { from_words(longer); }, ErrorKind::internal);
}

TEST(TraceFile, HasATrackForEachStreamOfEachDevice) {
  auto records = two_ranks();
  records[0].kernels = {{"a", 0, 7, 0, 1, 2}, {"b", 1, 7, 0, 2, 3}, {"c", 0, 7, 0, 3, 4}};
  const std::string text = trace_json(records, find_waits(records), {});
  expect_parts(text, {R"("tid":1,"name":"thread_name","args":{"name":"GPU 0 stream 7"})",
                      R"("tid":2,"name":"thread_name","args":{"name":"GPU 1 stream 7"})"});
  EXPECT_EQ(text.find(R"("tid":3)"), std::string::npos);
}

TEST(TraceFile, SaysWhoseClockItIs) {
  auto records = two_ranks();
  const auto text = [&] { return trace_json(records, find_waits(records), {{"mesh", "tp=2"}}); };
  expect_parts(text(), {R"("clock":"one for all ranks","mesh":"tp=2")", R"("slowest_rank":1)"});
  records[1].machine = 3;
  expect_parts(text(), {"times of two machines do not compare",
                        R"("waited":"unknown: ranks are on machines with different clocks")"});
}

}  // namespace
}  // namespace moesh::train
