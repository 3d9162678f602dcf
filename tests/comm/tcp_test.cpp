// Processes that meet without MPI: what launched them, how they prove their rank, and the
// conformance suite over their connections. Here each rank is a thread with a connection of its
// own; torchrun_test.py has processes.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "conformance.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/comm/tcp/tcp_world.h"
#include "nccl_loopback.h"
#include "tests/support.h"

namespace moesh::comm {
namespace {

using namespace std::chrono_literals;
using Kind = Launcher::Kind;

// ---------------------------------------------------------------- proofs

std::string hex(const Digest& digest) {
  std::string text;
  for (const auto byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// FIPS 180-4, and lengths around a block.
TEST(Sha256, HasTheDigestsOfTheStandard) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, HmacHasTheDigestsOfRfc4231) {
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// ---------------------------------------------------------------- launchers

Launcher under(const std::map<std::string, std::string>& variables) {
  return find_launcher([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(Launchers, AreRecognisedByWhatTheySet) {
  EXPECT_EQ(under({}).kind, Kind::none);
  EXPECT_EQ(under({}).num_processes, 0);
  const auto mpi = under({{"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                          {"SLURM_PROCID", "0"},
                          {"SLURM_STEP_NUM_TASKS", "1"}});
  EXPECT_EQ(mpi.kind, Kind::mpi);
  EXPECT_EQ(mpi.num_processes, 4);
  EXPECT_EQ(mpi.place, 3);
  EXPECT_EQ(mpi.num_on_machine, 4) << "nobody says that there is another";
  EXPECT_EQ(under({{"PMIX_RANK", "0"}, {"SLURM_NTASKS", "8"}}).num_processes, 8);
  EXPECT_EQ(
      under({{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}).num_on_machine,
      4);
  EXPECT_EQ(under({{"PMI_SIZE", "8"}, {"MPI_LOCALNRANKS", "2"}}).num_on_machine, 2);
  EXPECT_EQ(under({{"PMIX_RANK", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_NODES", "2"}})
                .num_on_machine,
            4);

  const auto torchrun = under({{"RANK", "5"},
                               {"WORLD_SIZE", "8"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "4"},
                               {"MASTER_ADDR", "gpu1"},
                               {"MASTER_PORT", "29500"}});
  EXPECT_EQ(torchrun.kind, Kind::torchrun);
  EXPECT_EQ(torchrun.rank, 5);
  EXPECT_EQ(torchrun.num_processes, 8);
  EXPECT_EQ(torchrun.place, 1);
  EXPECT_EQ(torchrun.num_on_machine, 4);
  EXPECT_EQ(torchrun.address, "gpu1");
  EXPECT_EQ(torchrun.port, 29501);  // torchrun itself listens on the other

  const auto srun = under({{"SLURM_PROCID", "3"},
                           {"SLURM_STEP_NUM_TASKS", "4"},
                           {"SLURM_STEP_NUM_NODES", "2"},
                           {"SLURM_LOCALID", "1"},
                           {"SLURM_STEP_NODELIST", "gpu[07-08]"},
                           {"SLURM_JOB_ID", "1234567"}});
  EXPECT_EQ(srun.kind, Kind::srun);
  EXPECT_EQ(srun.rank, 3);
  EXPECT_EQ(srun.num_on_machine, 2);
  EXPECT_EQ(srun.address, "gpu07");
  EXPECT_EQ(srun.port, 24567);
}

// A batch script is one process, whatever the job has asked for; and so is torchrun of one.
TEST(Launchers, OneProcessIsLaunchedByNobody) {
  EXPECT_EQ(under({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}}).kind, Kind::none);
  EXPECT_EQ(under({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).kind, Kind::none);
  EXPECT_EQ(under({{"RANK", "0"}}).kind, Kind::none);
  EXPECT_EQ(
      under({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "x"}, {"MASTER_PORT", "29500"}})
          .kind,
      Kind::none);
}

TEST(Launchers, WhatCannotBeIsNamed) {
  const auto error = [](std::map<std::string, std::string> changes) {
    std::map<std::string, std::string> v{
        {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "x"}, {"MASTER_PORT", "1"}};
    for (const auto& [name, value] : changes) v[name] = value;
    return error_of([&] { under(v); }, ErrorKind::config);
  };
  expect_parts(error({{"RANK", "2"}}), {"RANK is '2'", "from 0 to 1"});
  expect_parts(error({{"WORLD_SIZE", "two"}}), {"WORLD_SIZE is 'two'"});
  expect_parts(error({{"MASTER_ADDR", ""}}), {"MASTER_ADDR is empty"});
  expect_parts(error({{"MOESH_PORT", "70000"}}), {"MOESH_PORT is '70000'", "65535"});
  // One of several processes does not train by itself.
  const auto without = [](const std::map<std::string, std::string>& v) {
    return error_of([&] { under(v); }, ErrorKind::config);
  };
  expect_parts(without({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), {"MASTER_ADDR is not set"});
  expect_parts(without({{"WORLD_SIZE", "2"}, {"MASTER_ADDR", "x"}}), {"RANK is not set"});
  expect_parts(without({{"RANK", "1"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "x"}}),
               {"WORLD_SIZE is not set"});
}

TEST(Launchers, TheFirstNodeOfAListOfSlurms) {
  EXPECT_EQ(first_node("gpu1"), "gpu1");
  EXPECT_EQ(first_node("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(first_node("gpu[07-09,12],login"), "gpu07");
  EXPECT_EQ(first_node("gpu[3,5]"), "gpu3");
  EXPECT_EQ(first_node("gpu[3]-ib,x"), "gpu3-ib");
  EXPECT_EQ(first_node("a,gpu[3-5]"), "a");
  error_of([] { first_node("gpu[3"); }, ErrorKind::config);
}

TEST(Launchers, RankThreadsThatShareOneOfSeveralGpusAreTold) {
  expect_parts(unused_gpus(4, 8), {"4 ranks", "GPU 0 of 8", "torchrun --nproc-per-node 4"});
  EXPECT_EQ(unused_gpus(1, 8), "");
  EXPECT_EQ(unused_gpus(4, 1), "");
}

// ---------------------------------------------------------------- worlds

constexpr const char* kSecret = "sixteen or more letters";

// A world whose ranks are threads of this process that meet as processes do.
class Links {
 public:
  explicit Links(int size, std::chrono::milliseconds timeout = 20s) : size_(size) {
    links_.resize(static_cast<std::size_t>(size));
    links_[0] = make(0, kSecret, timeout);
    each([&](int rank) {
      if (rank > 0) links_[static_cast<std::size_t>(rank)] = make(rank, kSecret, timeout);
    });
  }
  ~Links() {
    // As processes that end: rank 0, with the hub, waits for the others.
    while (links_.size() > 1) links_.pop_back();
  }

  std::unique_ptr<TcpLink> make(int rank, const std::string& secret,
                                std::chrono::milliseconds timeout, int size = 0) const {
    return std::make_unique<TcpLink>(Rendezvous{.address = "127.0.0.1",
                                                .port = rank == 0 && !links_[0] ? 0 : port(),
                                                .rank = rank,
                                                .size = size ? size : size_,
                                                .secret = secret},
                                     timeout);
  }
  int port() const { return links_[0] ? links_[0]->port() : 0; }

  // Runs f as the ranks of one world; what each of them throws.
  std::vector<std::string> run(const std::function<void(Group&)>& f,
                               const LaunchOptions& options = {.timeout = 20s}) {
    std::vector<std::string> faults(static_cast<std::size_t>(size_));
    kinds_.assign(faults.size(), std::nullopt);
    ++number_;
    each([&](int rank) {
      try {
        launch_on(*links_[static_cast<std::size_t>(rank)], number_, f, options);
      } catch (const std::exception& e) {
        faults[static_cast<std::size_t>(rank)] = e.what();
        if (const auto* ours = dynamic_cast<const Error*>(&e))
          kinds_[static_cast<std::size_t>(rank)] = ours->kind();
      }
    });
    return faults;
  }
  // What each rank threw in the last run.
  const std::vector<std::optional<ErrorKind>>& kinds() const { return kinds_; }

 private:
  void each(const std::function<void(int)>& f) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < size_; ++r) threads.emplace_back(f, r);
    for (auto& t : threads) t.join();
  }

  const int size_;
  std::int64_t number_ = 0;
  std::vector<std::optional<ErrorKind>> kinds_;
  std::vector<std::unique_ptr<TcpLink>> links_;
};

void expect_no_faults(const std::vector<std::string>& faults) {
  for (const auto& fault : faults) EXPECT_EQ(fault, "");
}

class TcpConformance : public testing::TestWithParam<int> {};

TEST_P(TcpConformance, Holds) {
  Links links(GetParam());
  for (const bool is_checked : {false, true})
    for (const auto& c : conformance::cases()) {
      SCOPED_TRACE(c.name);
      expect_no_faults(links.run(
          [&](Group& world) { c.run(world, {.checked = is_checked, .any_order = !is_checked}); },
          {.timeout = 60s, .checked = is_checked}));
    }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TcpConformance, testing::Values(1, 2, 3));

TEST(Tcp, HasTheBitsOfThreads) {
  std::atomic<std::uint64_t> of_threads = 0, of_tcp = 0;
  launch(3, [&](Group& world) { of_threads = conformance::digest(world, {}, 11); });
  Links links(3);
  expect_no_faults(links.run([&](Group& world) { of_tcp = conformance::digest(world, {}, 11); }));
  EXPECT_NE(of_tcp, 0u);
  EXPECT_EQ(of_tcp, of_threads);
}

// What torchrun starts: the ids of NCCL go over the connections, and the program sees NCCL's world.
TEST(Tcp, RanksFormAnNcclWorld) {
  const auto nccl = loopback::make(at::kCPU, loopback::Pace::queued);
  Links links(3);
  std::atomic<int> sum = 0;
  const auto program = [&](Group& world) {
    sum += world.all_reduce(at::full({1}, world.rank() + 1, at::kLong)).item<int>();
    const auto host = world.background("saving");  // a second thread's: over TCP again
    EXPECT_EQ(host->all_reduce(at::ones({2})).sum().item<double>(), 6.0);
  };
  expect_no_faults(links.run(on_nccl(program, {.backend = Backend::nccl}, nccl.api)));
  EXPECT_EQ(sum, 3 * 6);
  EXPECT_EQ(nccl.count->created, 3);
  EXPECT_EQ(nccl.count->destroyed, 3);
}

TEST(Tcp, AStrangerIsTurnedAwayAndDisturbsNobody) {
  Links links(2);
  const auto refused = [&](int rank, const std::string& secret, int size = 0) {
    return error_of([&] { links.make(rank, secret, 5s, size); }, ErrorKind::config);
  };
  expect_parts(refused(1, "another secret of many letters"), {"does not know MOESH_SECRET"});
  expect_parts(refused(1, kSecret), {"rank 1", "there is a rank 1 already"});
  expect_parts(refused(1, kSecret, 5), {"rank 1 of 5", "rank 0 is of 2"});
  // A stranger that speaks another language, says too much, or nothing at all.
  for (const std::string& said :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(5000, '\xff'),
        std::string(bytes_of(Hello())) + std::string(9000, 'x'), std::string()}) {
    const Descriptor socket = connect_to("127.0.0.1", links.port(), TcpLink::Clock::now() + 5s);
    if (!said.empty()) EXPECT_GT(::send(socket.get(), said.data(), said.size(), MSG_NOSIGNAL), 0);
    expect_no_faults(links.run([](Group& world) { world.barrier(); }));
  }
}

// More of them than the hub keeps: a rank that comes behind them gets in before their time is over.
TEST(Tcp, IdleConnectionsKeepNoRankOut) {
  for (const bool says_hello : {false, true}) {
    SCOPED_TRACE(says_hello);
    const Rendezvous zero{.address = "127.0.0.1", .rank = 0, .size = 2, .secret = kSecret};
    Rendezvous one = zero;
    const TcpLink first(zero, 5s);
    one.rank = 1;
    one.port = first.port();
    std::vector<Descriptor> idle;
    for (int i = 0; i < 300; ++i) {
      idle.push_back(connect_to("127.0.0.1", one.port, TcpLink::Clock::now() + 5s));
      if (says_hello)
        ::send(idle.back().get(), bytes_of(Hello()).data(), sizeof(Hello), MSG_NOSIGNAL);
    }
    const TcpLink second(one, says_hello ? 9s : 5s);
  }
}

// A process that does not know the secret cannot pass for rank 0 either.
TEST(Tcp, AFalseHubIsNoticed) {
  const Hub hub(
      {.address = "127.0.0.1", .rank = 0, .size = 2, .secret = "another secret of many letters"});
  const Rendezvous mine{
      .address = "127.0.0.1", .port = hub.port(), .rank = 1, .size = 2, .secret = kSecret};
  expect_parts(error_of([&] { TcpLink(mine, 5s); }, ErrorKind::config),
               {"does not know MOESH_SECRET", "MOESH_PORT"});
}

TEST(Tcp, RankZeroThatIsNotThereIsNamedInTime) {
  const Rendezvous mine{.address = "127.0.0.1", .port = 1, .rank = 1, .size = 2, .secret = kSecret};
  expect_parts(error_of([&] { TcpLink(mine, 300ms); }, ErrorKind::comm),
               {"rank 0 cannot be reached at 127.0.0.1:1", "refused", "MASTER_ADDR"});
}

TEST(Tcp, SomethingElseAtThePortThatDoesNotAnswerIsNamedInTime) {
  const Descriptor mute = listen_at("127.0.0.1", 0);
  const Rendezvous mine{
      .address = "127.0.0.1", .port = port_of(mute), .rank = 1, .size = 2, .secret = kSecret};
  expect_parts(error_of([&] { TcpLink(mine, 300ms); }, ErrorKind::comm),
               {"rank 1 waited for rank 0", "did not answer in time"});
}

TEST(Tcp, APortThatIsTakenIsNamed) {
  const Links links(1);
  const Rendezvous mine{
      .address = "127.0.0.1", .port = links.port(), .rank = 0, .size = 2, .secret = kSecret};
  expect_parts(error_of([&] { TcpLink(mine, 5s); }, ErrorKind::config),
               {"cannot listen at", "MOESH_PORT"});
}

TEST(Tcp, TheFaultOfOneRankEndsTheOthers) {
  Links links(3);
  const auto faults = links.run([](Group& world) {
    MOESH_CHECK(world.rank() != 1, ErrorKind::data, "no such file");
    world.barrier();
  });
  EXPECT_EQ(faults[1], "no such file");
  for (const int other : {0, 2})
    expect_parts(faults[static_cast<std::size_t>(other)], {"rank 1 failed: no such file"});
  for (const auto& kind : links.kinds()) EXPECT_EQ(kind, ErrorKind::data) << "the exit code";
  expect_no_faults(links.run([](Group& world) { world.barrier(); }));  // the next world is sound
}

TEST(Tcp, ARankThatComesLateIsNamed) {
  Links links(3);
  const auto faults = links.run(
      [](Group& world) {
        if (world.rank() == 2) std::this_thread::sleep_for(1500ms);
        world.barrier();
      },
      {.timeout = 500ms});
  expect_parts(faults[0], {"rank 2 did not arrive within 0.5 s"});
}

}  // namespace
}  // namespace moesh::comm
