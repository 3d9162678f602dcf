#pragma once
// A small model with its optimizer on a mesh, saved and loaded as a run does it.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "moesh/checkpoint/folder.h"
#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/optim/rules.h"
#include "moesh/train/checkpointer.h"
#include "moesh/train/loop.h"

namespace moesh {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> number = 0;
    path_ = std::filesystem::path(testing::TempDir()) /
            ("moesh_checkpoint_" + std::to_string(getpid()) + "_" + std::to_string(number++));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The files of a checkpoint by name, without those that tell who wrote it and where.
inline std::map<std::string, std::string> contents(const std::filesystem::path& checkpoint) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(checkpoint)) {
    const auto name = std::filesystem::relative(entry.path(), checkpoint).string();
    if (entry.is_regular_file() && name != "moesh.json" && name != "run.toml")
      files[name] = bytes_of(entry.path());
  }
  return files;
}

inline void expect_same_contents(const std::filesystem::path& a, const std::filesystem::path& b) {
  const auto in_a = contents(a), in_b = contents(b);
  EXPECT_GE(in_a.size(), 4u) << a;  // weights, index, config, optimizer
  ASSERT_EQ(in_a.size(), in_b.size());
  for (const auto& [name, bytes] : in_a) {
    ASSERT_TRUE(in_b.contains(name)) << name;
    EXPECT_TRUE(bytes == in_b.at(name)) << name << " differs in " << a << " and " << b;
  }
}

using Args = std::vector<std::string>;

/// The configuration of a run that saves into `folder`.
inline config::Config run_config(const std::filesystem::path& folder, const std::string& mesh,
                                 Args more = {}) {
  more.insert(more.begin(),
              {"--checkpoint.enable", "--checkpoint.folder", folder.string(), "--mesh", mesh,
               "--metrics.folder", (folder.parent_path() / "metrics").string(),
               "--data.sequence_length=8", "--data.batch_size=2", "--metrics.log_freq=1000"});
  return config::load_config(more);
}

inline train::RunSummary run(const std::filesystem::path& folder, const std::string& mesh,
                             const Args& more) {
  return train::train(run_config(folder, mesh, more));
}

/// Loads the newest checkpoint of `from` on a mesh, and saves it into `to`.
inline void pass_on(const std::filesystem::path& from, const std::filesystem::path& to,
                    const std::string& mesh, const Args& more = {}) {
  const auto in = run_config(from, mesh, more), out = run_config(to, mesh, more);
  comm::launch(mesh_shape(in).num_ranks(), [&](comm::Group& world) {
    const Mesh m(world, mesh_shape(in));
    const MeshScope scope(m);
    const auto model = train::make_model(in);
    optim::ParamList params;
    model->each_param([&](Stored& w, bool) { params.add(w); });
    optim::Optimizer optimizer(params, std::make_shared<optim::AdamW>());
    const auto position = train::Checkpointer(in, world, *model, optimizer).start();
    train::Checkpointer(out, world, *model, optimizer).finish(position);
  });
}

}  // namespace moesh
