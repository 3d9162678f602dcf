// Several threads of a rank that write and hash: each piece once, the same files, and no fault
// lost.

#include "moesh/checkpoint/file.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>

#include "moesh/checkpoint/folder.h"
#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/save.h"
#include "moesh/comm/launch.h"
#include "tests/checkpoint/support.h"
#include "tests/faulty_file_system.h"
#include "tests/support.h"

namespace moesh::checkpoint {
namespace {

using std::filesystem::path;

TEST(Workers, DoEachPieceOnce) {
  for (const int num_threads : {1, 2, 5})
    for (const std::size_t num_items : {0, 1, 3, 200}) {
      std::vector<std::atomic<int>> done(num_items);
      share_work(num_items, num_threads, [&](std::size_t i, std::size_t thread) {
        EXPECT_LT(thread, static_cast<std::size_t>(num_threads));
        ++done[i];
      });
      for (const auto& n : done) EXPECT_EQ(n, 1);
    }
}

TEST(Workers, ThrowWhatOneOfThemThrewAndBeginNothingMore) {
  for (const int num_threads : {1, 4}) {
    std::atomic<int> num_begun = 0;
    const auto work = [&] {
      share_work(100000, num_threads, [&](std::size_t i, std::size_t) {
        ++num_begun;
        MOESH_CHECK(i != 3, ErrorKind::storage, "the disk of piece ", i);
        // However late that thread is run: the others would take half a minute.
        if (i > 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
    };
    expect_parts(error_of(work, ErrorKind::storage), {"the disk of piece 3"});
    EXPECT_LT(num_begun, 100000);
  }
}

// The calling thread is free meanwhile, and may end the work: other ranks may have failed.
TEST(Workers, TheCallerLooksAroundMeanwhile) {
  for (const int num_threads : {1, 3}) {
    std::atomic<bool> seen = false, has_thrown = false;
    int num_looks = 0;
    const auto work = [&] {
      share_work(
          1000000, num_threads,
          [&](std::size_t, std::size_t) {
            if (num_threads == 1) return;
            while (!seen) std::this_thread::yield();
            // Work goes on for a while after the caller has given up, and is not looked at.
            if (has_thrown) std::this_thread::sleep_for(std::chrono::milliseconds(100));
          },
          [&] {
            has_thrown = ++num_looks >= 3;
            seen = true;
            MOESH_CHECK(!has_thrown, ErrorKind::comm, "another rank has failed");
            if (num_threads > 1) seen = false;
          });
    };
    expect_parts(error_of(work, ErrorKind::comm), {"another rank has failed"});
    EXPECT_EQ(num_looks, 3);
  }
}

// Tensors of three files, split by rows over the ranks.
Snapshot snapshot_of(int rank, int num_ranks) {
  Snapshot s;
  s.manifest.step = 1;
  TensorSet set{.prefix = "model"};
  for (int i = 0; i < 12; ++i) {
    const std::int64_t rows = 300 + i, first = rows * rank / num_ranks,
                       last = rows * (rank + 1) / num_ranks;
    const std::string name = "w" + std::to_string(i);
    set.parts.push_back({.name = name,
                         .shape = {rows, 1000},
                         .region = {{first, 0}, {last - first, 1000}},
                         .owned = true,
                         .value = at::arange(first * 1000, last * 1000, at::kFloat)
                                      .add(i)
                                      .reshape({last - first, 1000})});
    set.tensors.push_back(formats::whole_tensor(name, name, {rows, 1000}));
    set.tensors.back().dtype = formats::Dtype::f32;
  }
  s.sets.push_back(std::move(set));
  return s;
}

path save_with(const path& folder, int num_ranks, int num_threads) {
  path saved;
  comm::launch(num_ranks, [&](comm::Group& world) {
    const path mine =
        save(snapshot_of(world.rank(), num_ranks),
             {.folder = folder, .max_shard_size = 5'000'000, .num_threads = num_threads}, world);
    if (world.rank() == 0) saved = mine;
  });
  return saved;
}

TEST(Workers, WriteTheSameFiles) {
  const TemporaryFolder folder;
  const path one = save_with(folder.path() / "one", 1, 1);
  for (const int num_ranks : {1, 3})
    for (const int num_threads : {1, 4}) {
      const path several =
          save_with(folder.path() / (std::to_string(num_ranks) + "x" + std::to_string(num_threads)),
                    num_ranks, num_threads);
      EXPECT_TRUE(find_damage(several).empty());
      int num_files = 0;
      for (const auto& entry : std::filesystem::directory_iterator(one)) {
        if (entry.path().extension() != ".safetensors") continue;
        ++num_files;
        EXPECT_EQ(bytes_of(entry.path()), bytes_of(several / entry.path().filename()));
      }
      EXPECT_EQ(num_files, 3);
    }
}

// What a rank keeps of files does not grow with their number: blocks go when their file is read.
TEST(Workers, KeepNoBlocksOfFilesThatAreRead) {
  const TemporaryFolder folder;
  const path saved = save_with(folder.path(), 1, 2);
  const auto manifest = formats::read_manifest(saved.string());
  const auto files = TensorFolder::of_checkpoint(saved, manifest, "model");
  EXPECT_EQ(files.kept_bytes(), 0u);
  Snapshot like = snapshot_of(0, 1);
  auto& set = like.sets.front();
  std::vector<at::Tensor> wanted;
  for (auto& part : set.parts)
    wanted.push_back(std::exchange(part.value, at::empty_like(part.value)));
  const formats::DiskTable table{.tensors = set.tensors};
  Loader(files, table).load(set.parts);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    EXPECT_TRUE(at::equal(set.parts[i].value, wanted[i])) << i;
  EXPECT_EQ(files.kept_bytes(), 0u);
}

// The cores of a machine are divided among its ranks, and not among all ranks there are.
TEST(Workers, ShareTheCoresOfTheirMachine) {
  const auto cores = static_cast<int>(std::thread::hardware_concurrency());
  for (const int num_ranks : {1, 2, 3})
    comm::launch(num_ranks, [&](comm::Group&) {
      EXPECT_EQ(comm::cores_of_rank(), std::max(1, cores / num_ranks));
      int elsewhere = 0;  // a save may run on a thread of its own
      std::thread([&] { elsewhere = num_workers(std::uint64_t{1} << 40); }).join();
      EXPECT_EQ(elsewhere, std::clamp(cores / num_ranks, 1, 8));
      EXPECT_EQ(num_workers(1000), 1);
    });
}

// A block that one thread wrote part of, and another the rest, is read back like any other; so is
// one of which two ranks have a part.
TEST(Workers, ReadEveryBlockBackOnce) {
  for (const int num_ranks : {1, 3}) {
    const TemporaryFolder folder;
    WithFaults counted("read model- 1 0 0");
    path saved;
    comm::launch(num_ranks, [&](comm::Group& world) {
      Snapshot s;
      s.manifest.step = 1;
      TensorSet set{.prefix = "model"};
      for (int i = 0; i < 9; ++i) {  // 135 MB: several batches
        const std::string name = "w" + std::to_string(i);
        const std::int64_t rows = 3600 / num_ranks;
        set.parts.push_back({.name = name,
                             .shape = {3600, 1041},
                             .region = {{rows * world.rank(), 0}, {rows, 1041}},
                             .owned = true,
                             .value = at::full({rows, 1041}, i + 10 * world.rank(), at::kFloat)});
        set.tensors.push_back(formats::whole_tensor(name, name, {3600, 1041}));
        set.tensors.back().dtype = formats::Dtype::f32;
      }
      s.sets.push_back(std::move(set));
      const path mine = save(s, {.folder = folder.path(), .num_threads = 3}, world);
      if (world.rank() == 0) saved = mine;
    });
    const auto manifest = formats::read_manifest(saved.string());
    const auto* file = manifest.find("model-00001-of-00001.safetensors");
    ASSERT_TRUE(file);
    EXPECT_EQ(counted.files.num_seen(), static_cast<int>(formats::num_blocks(file->size)));
    EXPECT_TRUE(find_damage(saved).empty());
  }
}

// A thread has one file open at a time, however many there are.
TEST(Workers, NeedFewDescriptors) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{64, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  const TemporaryFolder folder;
  path saved;
  EXPECT_NO_THROW(comm::launch(1, [&](comm::Group& world) {
    Snapshot s;
    s.manifest.step = 1;
    TensorSet set{.prefix = "model"};
    for (int i = 0; i < 100; ++i) {
      const std::string name = "w" + std::to_string(i);
      set.parts.push_back({.name = name,
                           .shape = {8},
                           .region = {{0}, {8}},
                           .owned = true,
                           .value = at::full({8}, i, at::kFloat)});
      set.tensors.push_back(formats::whole_tensor(name, name, {8}));
      set.tensors.back().dtype = formats::Dtype::f32;
    }
    s.sets.push_back(std::move(set));
    saved = save(s, {.folder = folder.path() / "c", .max_shard_size = 32, .num_threads = 4}, world);
  }));
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_TRUE(find_damage(saved).empty());
}

TEST(Workers, LoseNoFault) {
  for (const auto& [rule, said] : std::map<std::string, std::string>{
           {detail::concat("write model-00002 3 1 ", EIO), "cannot write"},
           {detail::concat("sync model-00003 2 1 ", EIO), "cannot flush"},
           {"write model-00002 2 1 flip", "were read back with other values"},
           {"read model-00003 1 1 flip", "were read back with other values"}}) {
    SCOPED_TRACE(rule);
    const TemporaryFolder folder;
    const WithFaults faults(rule);
    expect_parts(
        error_of([&, said = said] { save_with(folder.path() / "c", 1, 4); }, ErrorKind::storage),
        {said});
    EXPECT_EQ(faults.files.num_hit(), 1);
    EXPECT_TRUE(saved_steps(folder.path() / "c").empty());
  }
}

}  // namespace
}  // namespace moesh::checkpoint
