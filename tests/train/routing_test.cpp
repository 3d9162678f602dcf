// Routing into files and from files: the same for every mesh, and what is wrong with a file is
// said. torch_test.py compares replayed runs with transformers.

#include "moesh/train/routing.h"

#include <gtest/gtest.h>

#include <array>

#include "tests/checkpoint/support.h"
#include "tests/expect_error.h"
#include "tests/train/random_routing.h"

namespace moesh::train {
namespace {

using std::filesystem::path;

// Eight sequences a step in float64, whatever the mesh.
Args routed(Args more) {
  const Args all{"--dtype=float64",
                 "--steps=3",
                 "--training.global_batch_size=8",
                 "--data.sequence_length=7",
                 "--checkpoint.interval=1",
                 "--model.top_k=3"};
  more.insert(more.begin(), all.begin(), all.end());
  return more;
}

std::string replay(const path& folder) { return "--moe.replay=" + folder.string(); }
std::string record(const path& folder) { return "--moe.record=" + folder.string(); }

void expect_same_routing(const path& a, const path& b, const std::string& what) {
  for (const int step : {1, 2, 3}) {
    const std::string bytes = bytes_of(a / routing_name(step));
    EXPECT_GT(bytes.size(), 2u * 56 * 3 * sizeof(std::int16_t)) << what;
    EXPECT_TRUE(bytes == bytes_of(b / routing_name(step))) << what << ", step " << step;
  }
}

struct OnMesh {
  std::string mesh;
  Args more;
};
const std::vector<OnMesh> kMeshes{
    {"dp_shard=2,tp=2,ep=2", {"--data.batch_size=2"}},
    {"dp_replicate=2,cp=2", {"--data.batch_size=4", "--activation_checkpoint.mode=full"}},
    {"pp=2,cp=2,ep=2", {"--data.batch_size=2"}},
    {"pp=2,dp_shard=2", {"--data.batch_size=1", "--activation_checkpoint.mode=selective"}},
    {"tp=3",
     {"--data.batch_size=8", "--parallelism.sequence_parallel=false", "--model.num_heads=6",
      "--model.num_experts=12", "--model.num_groups=1", "--model.top_groups=1"}},
    {"cp=4,ep=4", {"--data.batch_size=4", "--debug.checked"}}};

TEST(Recording, IsTheSameOnEveryMesh) {
  const TemporaryFolder folder;
  const auto at = [&](const std::string& name) { return folder.path() / name; };
  for (const auto& [mesh, more] : kMeshes) {
    Args args = routed(more), one = args;
    one.push_back("--data.batch_size=8");
    one.push_back(record(at("one " + mesh))), args.push_back(record(at(mesh)));
    run(at("c1 " + mesh), "tp=1", one);
    run(at("c2 " + mesh), mesh, args);
    expect_same_routing(at("one " + mesh), at(mesh), mesh);
  }
}

// Also where it is not that of the router, on any mesh and after a resume.
TEST(Replay, IsWhatIsRecorded) {
  const TemporaryFolder folder;
  const auto at = [&](const std::string& name) { return folder.path() / name; };
  for (const auto& [mesh, more] : kMeshes) {
    const Args args = routed(more);
    const path given = at("given " + mesh);
    write_routing(given, run_config(at("c"), mesh, args), 3);
    Args all = args;
    all.insert(all.end(), {replay(given), record(at("out " + mesh))});
    const RunSummary first = run(at("c " + mesh), mesh, all);
    expect_same_routing(given, at("out " + mesh), mesh);
    std::filesystem::remove_all(at("c " + mesh) / checkpoint::step_name(2));
    std::filesystem::remove_all(at("c " + mesh) / checkpoint::step_name(3));
    std::filesystem::remove(at("out " + mesh) / routing_name(2));
    const RunSummary again = run(at("c " + mesh), mesh, all);
    ASSERT_EQ(again.losses.size(), 2u);
    EXPECT_EQ(again.losses[0], first.losses[1]) << mesh;
    EXPECT_EQ(again.losses[1], first.losses[2]) << mesh;
    expect_same_routing(given, at("out " + mesh), mesh + ", resumed");
  }
}

TEST(Replay, OfARunIsThatRunToTheBit) {
  const TemporaryFolder folder;
  const auto at = [&](const std::string& name) { return folder.path() / name; };
  const std::string mesh = "dp_shard=2,tp=2,ep=2";
  for (const std::string dtype : {"float32", "bfloat16"}) {
    Args args = routed({"--data.batch_size=2", "--dtype=" + dtype});
    const auto with = [&](const std::string& option) {
      Args all = args;
      all.push_back(option);
      return all;
    };
    const RunSummary plain = run(at("plain" + dtype), mesh, args);
    const RunSummary recorded = run(at("a" + dtype), mesh, with(record(at("routing" + dtype))));
    const RunSummary same = run(at("b" + dtype), mesh, with(replay(at("routing" + dtype))));
    EXPECT_EQ(plain.losses, recorded.losses);
    EXPECT_EQ(plain.losses, same.losses);
    for (const auto* name : {"a", "b"})
      expect_same_contents(at("plain" + dtype) / checkpoint::step_name(3),
                           at(name + dtype) / checkpoint::step_name(3));
    // -1: the router chooses.
    const auto config = run_config(at("c"), mesh, args);
    std::filesystem::create_directories(at("none" + dtype));
    for (const int step : {1, 2, 3})
      write_npy(at("none" + dtype) / routing_name(step),
                at::full_like(random_routing(config, 1), -1).to(at::kShort));
    EXPECT_EQ(run(at("d" + dtype), mesh, with(replay(at("none" + dtype)))).losses, plain.losses);
    write_routing(at("other" + dtype), config, 3, at::kByte);
    EXPECT_NE(run(at("e" + dtype), mesh, with(replay(at("other" + dtype)))).losses, plain.losses);
  }
}

TEST(Replay, RefusesOtherFiles) {
  const TemporaryFolder folder;
  const path given = folder.path() / "given", file = given / routing_name(1);
  const Args args = routed({"--data.batch_size=2", replay(given)});
  const auto refused = [&](const std::string& reason) {
    expect_parts(error_of([&] { run(folder.path() / "c", "dp_shard=2", args); }, ErrorKind::data),
                 {reason});
  };
  refused("there is no");
  const auto config = run_config(folder.path() / "c", "dp_shard=2", args);
  write_routing(given, config, 1);
  refused("the routing of step 2; write it, or set training.steps to 1");
  std::filesystem::remove_all(folder.path() / "c");
  const at::Tensor good = random_routing(config, 1);
  const auto put = [&](const at::Tensor& routing) { write_npy(file, routing); };
  put(good.narrow(0, 0, 1));
  refused("has the shape [1, 56, 3], and a step of this run is [2, 56, 3]");
  put(good.narrow(1, 0, 55));
  refused("has the shape [2, 55, 3]");
  put(good.narrow(2, 0, 2));
  refused("has the shape [2, 56, 2]");
  const auto with = [&](std::int64_t token, std::array<std::int64_t, 3> experts) {
    at::Tensor other = good.clone();
    for (int k = 0; k < 3; ++k) other[1][token][k] = experts[static_cast<std::size_t>(k)];
    return other;
  };
  put(with(50, {0, 8, 1}));
  refused("token 50 of layer 1 has the experts [0, 8, 1]; it takes 3 different ones of 0 to 7");
  put(with(3, {2, 5, 2}));
  refused("token 3 of layer 1 has the experts [2, 5, 2]");
  put(with(3, {2, -1, -1}));
  refused("token 3 of layer 1 has the experts [2, -1, -1]");
  put(with(3, {2, 1, -2}));
  refused("token 3 of layer 1 has the experts [2, 1, -2]");
  put(good);
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 2);
  refused("cut off");
  std::ofstream(file, std::ios::binary) << "text";
  refused("not an .npy");
  std::ofstream(file, std::ios::binary)
      << formats::npy_header(formats::IdType::uint16, good.sizes())
      << std::string(2 * static_cast<std::size_t>(good.numel()), '\0');
  refused("has values of type uint16; it takes uint8, int16, int32 or int64");
  expect_error([&] { run_config(given, "tp=1", {replay(given), record(given)}); },
               "another folder");
  expect_error([&] { run_config(given, "tp=1", {replay(given), "--moe.force_load_balance"}); },
               "leave out one of them");
}

}  // namespace
}  // namespace moesh::train
