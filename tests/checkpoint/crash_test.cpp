// The process is killed at every named point of a save; after each, an intact checkpoint is there,
// and the next save works. This program runs itself: crash_test --save FOLDER STEP GENERATION KEEP.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "moesh/checkpoint/fail_point.h"
#include "moesh/checkpoint/folder.h"
#include "moesh/checkpoint/inspect.h"
#include "moesh/checkpoint/load.h"
#include "moesh/checkpoint/save.h"
#include "moesh/comm/launch.h"

namespace moesh::checkpoint {
namespace {

using std::filesystem::path;

constexpr std::int64_t kRows = 6, kColumns = 5;

std::vector<Part> parts_of(int rank, int num_ranks, double value) {
  const std::int64_t rows = kRows / num_ranks;
  std::vector<Part> parts;
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
    save(s, {.folder = folder, .keep_latest = keep}, world);
  });
}

int run_save(const path& folder, int step, int generation, int keep, const char* fail_point) {
  const pid_t child = fork();
  if (child == 0) {
    setenv("MOESH_FAIL_POINT", fail_point, 1);
    const std::string numbers[] = {std::to_string(step), std::to_string(generation),
                                   std::to_string(keep)};
    execl("/proc/self/exe", "crash_test", "--save", folder.c_str(), numbers[0].c_str(),
          numbers[1].c_str(), numbers[2].c_str(), nullptr);
    _exit(99);
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

TEST(Crash, AWholeCheckpointSurvivesAtEveryPoint) {
  const path folder = path(testing::TempDir()) / ("moesh_crash_" + std::to_string(getpid()));
  const path base = path(folder).concat("_base");
  save_generation(base, 1, 1, 0);
  save_generation(base, 2, 2, 0);
  bool seen_old = false, seen_new = false;
  for (const char* point : kFailPoints) {
    SCOPED_TRACE(point);
    std::filesystem::remove_all(folder);
    std::filesystem::copy(base, folder, std::filesystem::copy_options::recursive);
    EXPECT_EQ(newest_generation(folder), 2);
    // Step 2 once more, so that a folder is replaced, and step 1 is purged.
    const int status = run_save(folder, 2, 3, 1, point);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "the save was not killed: no such point on its way";
    const int generation = newest_generation(folder);
    EXPECT_GE(generation, 1);
    seen_old |= generation < 3, seen_new |= generation == 3;
    save_generation(folder, 3, 4, 1);
    EXPECT_EQ(newest_generation(folder), 4);
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      EXPECT_TRUE(entry.path().filename().string().starts_with("step-")) << entry.path();
    EXPECT_TRUE(is_intact(folder / step_name(3)));
  }
  EXPECT_TRUE(seen_old && seen_new);
  for (const auto& used : {folder, base}) std::filesystem::remove_all(used);
}

}  // namespace
}  // namespace moesh::checkpoint

int main(int argc, char** argv) {
  if (argc == 6 && std::string(argv[1]) == "--save") {
    moesh::checkpoint::save_generation(argv[2], std::atoi(argv[3]), std::atoi(argv[4]),
                                       std::atoi(argv[5]));
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
