// The process is killed before every call on files that a save makes; after each, an intact
// checkpoint is there, and the next save works.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "moesh/checkpoint/folder.h"
#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/save.h"
#include "moesh/comm/launch.h"
#include "tests/faulty_file_system.h"

namespace moesh::checkpoint {
namespace {

using std::filesystem::path;

constexpr std::int64_t kRows = 6, kColumns = 5;

std::vector<TensorPart> parts_of(int rank, int num_ranks, double value) {
  const std::int64_t rows = kRows / num_ranks;
  std::vector<TensorPart> parts;
  for (const char* name : {"a", "b"})
    parts.push_back({.name = name,
                     .shape = {kRows, kColumns},
                     .region = {{rank * rows, 0}, {rows, kColumns}},
                     .owned = true,
                     .value = at::full({rows, kColumns}, value, at::kFloat)});
  return parts;
}

formats::DiskTable table() {
  formats::DiskTable table;
  for (const char* name : {"a", "b"}) {
    table.tensors.push_back(formats::whole_tensor(name, name, {kRows, kColumns}));
    table.tensors.back().dtype = formats::Dtype::f32;
  }
  return table;
}

int num_threads = 1;  // of each rank that saves

// What is saved is full of the number of its generation.
void save_generation(const path& folder, std::int64_t step, int generation, int keep) {
  comm::launch(2, [&](comm::Group& world) {
    Snapshot s;
    s.manifest.step = step;
    s.texts["config.json"] = "{}";
    for (const char* prefix : {"model", "optimizer/state"})
      s.sets.push_back({.prefix = prefix,
                        .tensors = table().tensors,
                        .parts = parts_of(world.rank(), 2, generation)});
    // The step that is there may be replaced, and those before it may be purged.
    save(s,
         {.folder = folder,
          .keep_latest = keep,
          .known = {1, 2, 3},
          .damaged = {step},
          .num_threads = num_threads},
         world);
  });
}

// The exit status of a process that saves on a disk with these faults, and ends.
int status_of_save(const path& folder, int step, int generation, int keep,
                   const std::string& rules) {
  const pid_t child = fork();
  if (child == 0) {
    // A child makes LibTorch's pool of threads anew at the first call: before several ranks do.
    at::set_num_threads(1);
    const WithFaults faults(rules);
    save_generation(folder, step, generation, keep);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// The generation of the newest whole checkpoint, every number of which must be the same.
int newest_generation(const path& folder) {
  const auto steps = saved_steps(folder);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const path checkpoint = folder / step_name(*step);
    if (!is_intact(checkpoint)) continue;
    EXPECT_TRUE(find_damage(checkpoint).empty());
    const auto manifest = read_intact_manifest(checkpoint);
    double generation = -1;
    for (const char* prefix : {"model", "optimizer/"}) {
      const auto source = TensorFolder::of_checkpoint(checkpoint, manifest, prefix);
      const auto parts = parts_of(0, 1, -2);
      const auto names = table();
      Loader(source, names).load(parts);
      for (const auto& p : parts) {
        EXPECT_EQ(p.value.min().item<double>(), p.value.max().item<double>());
        if (generation < 0) generation = p.value.max().item<double>();
        EXPECT_EQ(p.value.max().item<double>(), generation);
      }
    }
    return static_cast<int>(generation);
  }
  ADD_FAILURE() << "no whole checkpoint";
  return -1;
}

// `rules`: further faults of the disk. With the oldest generation that may be the newest whole one
// after a death: what is replaced counts as damaged, so nobody needs it.
void expect_to_survive_deaths(const std::string& rules, int oldest) {
  const path folder = path(testing::TempDir()) / ("moesh_crash_" + std::to_string(getpid()));
  const path base = path(folder).concat("_base");
  save_generation(base, 1, 0, 0);
  save_generation(base, 2, 1, 0);
  save_generation(base, 3, 2, 0);
  bool seen_old = false, seen_new = false, is_over = false;
  int num_deaths = 0;
  for (int call = 1; !is_over; ++call) {
    SCOPED_TRACE(call);
    std::filesystem::remove_all(folder);
    std::filesystem::copy(base, folder, std::filesystem::copy_options::recursive);
    EXPECT_EQ(newest_generation(folder), 2);
    // Step 3 once more, so that a folder is replaced, and step 1 is purged.
    const int status = status_of_save(
        folder, 3, 3, 1, rules + "any " + folder.string() + " " + std::to_string(call) + " 1 kill");
    is_over = WIFEXITED(status);
    ASSERT_TRUE(is_over || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    num_deaths += !is_over;
    const int generation = newest_generation(folder);
    EXPECT_GE(generation, oldest);
    seen_old |= generation < 3, seen_new |= generation == 3;
    save_generation(folder, 4, 4, 1);
    EXPECT_EQ(newest_generation(folder), 4);
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      EXPECT_TRUE(entry.path().filename().string().starts_with("step-")) << entry.path();
    EXPECT_TRUE(is_intact(folder / step_name(4)));
    EXPECT_FALSE(std::filesystem::exists(folder / step_name(1)));
  }
  EXPECT_TRUE(seen_old && seen_new);
  EXPECT_GE(num_deaths, 60);
  std::printf("%d deaths\n", num_deaths);
  for (const auto& used : {folder, base}) std::filesystem::remove_all(used);
}

TEST(Crash, AWholeCheckpointSurvivesADeathBeforeEveryCall) { expect_to_survive_deaths("", 2); }

TEST(Crash, AlsoWithSeveralThreadsThatWrite) {
  num_threads = 3;
  expect_to_survive_deaths("", 2);
  num_threads = 1;
}

TEST(Crash, AlsoWhereTheFileSystemCannotSwapTwoNames) {
  expect_to_survive_deaths(detail::concat("exchange step- 1 1000 ", EINVAL, ";"), 1);
}

}  // namespace
}  // namespace moesh::checkpoint
