// Work on files that takes longer than ranks wait for each other.
#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/formats/manifest.h"
#include "tests/checkpoint/support.h"
#include "tests/faulty_file_system.h"
#include "tests/support.h"

namespace moesh {
namespace {

using checkpoint::damage_in;
using checkpoint::Heartbeat;
using checkpoint::together;
using std::chrono::milliseconds;
using std::filesystem::path;

void work(int num_pieces, const Heartbeat& heartbeat) {
  for (int i = 0; i < num_pieces; ++i) {
    std::this_thread::sleep_for(milliseconds(20));
    checkpoint::beat(heartbeat);
  }
}

TEST(Together, LongWorkWithBreathsIsNotTakenForALostRank) {
  const comm::LaunchOptions options{.timeout = milliseconds(2000)};
  int num_done = 0;
  comm::launch(
      3,
      [&](comm::Group& world) {
        together(world, [&](const Heartbeat& heartbeat) {
          if (world.rank() != 1) return;
          std::thread helper([&] { work(200, heartbeat); });  // whose heartbeats do not count
          work(200, heartbeat);
          helper.join();
          ++num_done;
        });
      },
      options);
  EXPECT_EQ(num_done, 1);
}

TEST(Together, WhoTakesNoBreathIsALostRank) {
  const comm::LaunchOptions options{.timeout = milliseconds(300)};
  const auto lost = [&] {
    comm::launch(
        3,
        [](comm::Group& world) {
          together(world, [&](const Heartbeat&) {
            if (world.rank() == 1) work(75, {});
          });
        },
        options);
  };
  expect_parts(error_of(lost, ErrorKind::comm), {"rank 1 did not arrive"});
}

TEST(Together, OneThatFailsStopsTheOthers) {
  std::atomic<int> num_stopped = 0;
  const auto failing = [&] {
    comm::launch(3, [&](comm::Group& world) {
      try {
        together(world, [&](const Heartbeat& heartbeat) {
          MOESH_CHECK(world.rank() != 1, ErrorKind::storage, "the disk is gone");
          work(1'000'000, heartbeat);
        });
      } catch (const Error& e) {
        EXPECT_EQ(std::string(e.what()), "the disk is gone (rank 1)");
        ++num_stopped;
        throw;
      }
    });
  };
  error_of(failing, ErrorKind::storage);
  EXPECT_EQ(num_stopped, 3);
}

// ---------------------------------------------------------------- damage

void flip(const path& file, std::uint64_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(at));
  const auto byte = static_cast<char>(stream.get() ^ 4);
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(byte);
}

// Files of several sizes around those of blocks, with their manifest.
formats::Manifest make_folder(const path& folder) {
  constexpr auto block = formats::kBlockBytes;
  formats::Manifest manifest;
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1}, block, 2 * block + 3}) {
    const std::string name = "of-" + std::to_string(size);
    const std::string bytes(size, 'x');
    std::ofstream(folder / name, std::ios::binary) << bytes;
    formats::BlockSums sums;
    sums.add(0, bytes);
    manifest.files.push_back(formats::hash_file(folder.string(), name, sums));
  }
  std::ofstream(folder / formats::kManifestFile) << formats::write_manifest(manifest);
  return manifest;
}

// What every rank of a world is told; they must agree.
std::string told(const path& folder, int num_ranks) {
  std::vector<std::string> texts(static_cast<std::size_t>(num_ranks));
  comm::launch(num_ranks, [&](comm::Group& world) {
    texts[static_cast<std::size_t>(world.rank())] = damage_in(folder, world);
  });
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

TEST(DamageByAllRanks, IsFoundInEveryBlockOfEveryFile) {
  const TemporaryFolder folder;
  const auto manifest = make_folder(folder.path());
  for (const int num_ranks : {1, 2, 3, 8}) {
    EXPECT_EQ(told(folder.path(), num_ranks), "");
    for (const auto& file : manifest.files)
      for (std::uint64_t at = 0; at < file.size; at += formats::kBlockBytes) {
        SCOPED_TRACE(detail::concat(file.name, " byte ", at, " on ", num_ranks, " ranks"));
        flip(folder.path() / file.name, at);
        expect_parts(told(folder.path(), num_ranks), {file.name, detail::concat("bytes ", at)});
        flip(folder.path() / file.name, at);
      }
    const path last = folder.path() / manifest.files.back().name;
    std::filesystem::rename(last, folder.path() / "away");
    expect_parts(told(folder.path(), num_ranks), {last.filename().string()});
    std::filesystem::rename(folder.path() / "away", last);
  }
  flip(folder.path() / formats::kManifestFile, 40);
  expect_parts(told(folder.path(), 3), {formats::kManifestFile, "checksum of its first line"});
}

// Counts the reads of each rank: its thread.
class CountedReads final : public formats::FileSystem {
 public:
  CountedReads() { formats::set_file_system(this); }
  ~CountedReads() override { formats::set_file_system(nullptr); }
  ssize_t read(int file, void* to, std::size_t count, std::uint64_t offset) override {
    const auto result = FileSystem::read(file, to, count, offset);
    const std::lock_guard lock(mutex_);
    bytes[std::this_thread::get_id()] += static_cast<std::uint64_t>(result);
    return result;
  }
  std::map<std::thread::id, std::uint64_t> bytes;

 private:
  std::mutex mutex_;
};

TEST(DamageByAllRanks, DividesTheBlocks) {
  const TemporaryFolder folder;
  make_folder(folder.path());
  CountedReads reads;
  EXPECT_EQ(told(folder.path(), 3), "");
  ASSERT_EQ(reads.bytes.size(), 3u);
  std::uint64_t sum = 0;
  for (const auto& [thread, bytes] : reads.bytes) {
    EXPECT_LT(bytes, 2 * formats::kBlockBytes);  // of three whole blocks and two short ones
    sum += bytes;
  }
  EXPECT_GT(sum, 3 * formats::kBlockBytes);
}

// A slow disk and a short deadline stand for a large checkpoint: to read all of it takes one rank
// longer than the others wait.
TEST(DamageByAllRanks, ADamagedCheckpointThatTakesLongToReadIsNoLostRank) {
  const TemporaryFolder folder;
  const path runs = folder.path() / "c";
  const auto go = [&](const char* timeout) {
    return run(runs, "tp=2,ep=2",
               {"--steps=4", "--checkpoint.interval=2", "--checkpoint.max_shard_size=9000",
                std::string("--debug.timeout_seconds=") + timeout});
  };
  go("60");
  const path newest = runs / checkpoint::step_name(4);
  const auto files = formats::read_manifest(newest.string()).files;
  ASSERT_GT(files.size(), 80u);
  flip(newest / "config.json", 8);  // which loading reads first, and a check for damage last
  const WithFaults faults("read step-00000004 1 1000000 sleep50");
  EXPECT_EQ(go("2").first_step, 2);
  EXPECT_GT(faults.files.num_hit(), 80);
}

}  // namespace
}  // namespace moesh
