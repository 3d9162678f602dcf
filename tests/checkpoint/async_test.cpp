// Saving in the background while training goes on: on threads, and over the loopback table of NCCL,
// where a rank has one stream.
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/train/step.h"
#include "tests/checkpoint/support.h"
#include "tests/comm/nccl_loopback.h"
#include "tests/support.h"

namespace moesh {
namespace {

using std::filesystem::path;

// A run as the loop makes it, on a world that is already there.
void train_on(comm::Group& world, const config::Config& config, const data::Dataset& dataset) {
  const Mesh mesh(world, mesh_shape(config));
  const MeshScope scope(mesh);
  const auto model = train::make_model(config);
  const auto optimizer = train::make_optimizer(*model, config);
  train::Checkpointer checkpointer(config, world, *model, *optimizer);
  auto position = checkpointer.start();
  const auto options = train::step_options(config);
  while (position.step < config.training.steps) {
    const auto g = train::accumulate_gradients(
        *model, train::step_batches(config, dataset, mesh, position.data_position), options);
    train::apply_gradients(*model, *optimizer, g, train::learning_rates(config)(position.step),
                           options);
    position.step += 1;
    position.data_position += sample_order(config).num_per_step();
    checkpointer.after_step(position);
  }
  checkpointer.finish(position);
}

const Args kOptions{"--steps=6", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0",
                    "--optimizer.lr=1e-2"};

Args async() {
  Args options = kOptions;
  options.push_back("--checkpoint.async");
  return options;
}

void expect_same_checkpoints(const path& a, const path& b) {
  const auto steps = checkpoint::saved_steps(a);
  EXPECT_EQ(steps, (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(checkpoint::saved_steps(b), steps);
  for (const auto n : steps)
    expect_same_contents(a / checkpoint::step_name(n), b / checkpoint::step_name(n));
}

TEST(Async, OnThreadsSavesWhatASaveInBetweenDoes) {
  const TemporaryFolder folder;
  run(folder.path() / "sync", "dp_shard=2,tp=2,ep=2", kOptions);
  run(folder.path() / "async", "dp_shard=2,tp=2,ep=2", async());
  expect_same_checkpoints(folder.path() / "sync", folder.path() / "async");
}

// Every save, the first one as well: what it took from the step, and when it was done.
TEST(Async, SaysOfEachSaveWhatItTook) {
  const TemporaryFolder folder;
  testing::internal::CaptureStderr();
  run(folder.path() / "c", "dp_shard=2", async());
  const std::string said = testing::internal::GetCapturedStderr();
  for (int i = 1; i <= 6; ++i) {
    const std::string step = std::to_string(i);
    expect_parts(said, {"copied step " + step + " for saving in", "step-0000000" + step + " in "});
  }
  expect_parts(said, {"s, in the background"});
}

TEST(Async, OnNcclSavesBesideTheCollectivesOfTraining) {
  for (const auto pace : {comm::loopback::Pace::queued, comm::loopback::Pace::polled}) {
    const TemporaryFolder folder;
    run(folder.path() / "sync", "dp_shard=2,tp=2,ep=2", kOptions);
    const auto config = run_config(folder.path() / "nccl", "dp_shard=2,tp=2,ep=2", async());
    const auto dataset = train::open_dataset(config);
    const auto nccl = comm::loopback::make(at::kCPU, pace);
    comm::launch(
        4, comm::on_nccl([&](comm::Group& world) { train_on(world, config, *dataset); },
                         {.timeout = std::chrono::seconds(60), .backend = comm::Backend::nccl},
                         nccl.api));
    expect_same_checkpoints(folder.path() / "sync", folder.path() / "nccl");
    EXPECT_EQ(nccl.count->aborted, 0);
  }
}

}  // namespace
}  // namespace moesh
