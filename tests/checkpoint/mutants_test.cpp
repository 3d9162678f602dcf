// Mistakes that checkpoints have been known to make, switched on one by one: what the other tests
// compare tells each of them. Built with MOESH_WITH_MUTANTS, together with
// tests/nn/mutants_test.cpp.
#include <gtest/gtest.h>

#include "moesh/base/mutant.h"
#include "moesh/checkpoint/load.h"
#include "tests/checkpoint/support.h"

namespace moesh {
namespace {

using std::filesystem::path;

constexpr const char* kMesh = "dp_shard=2,tp=2,ep=2";
constexpr const char* kWeights = "model-00001-of-00001.safetensors";

path step(const path& folder, std::int64_t n) { return folder / checkpoint::step_name(n); }

train::RunSummary six_steps(const path& folder) {
  return run(folder, kMesh,
             {"--steps=6", "--checkpoint.interval=3", "--optimizer.lr=1e-2",
              "--moe.load_balance_coeff=0.05"});
}

// A run that goes on from its third step is the run that was never stopped.
bool resume_is_identical(const path& folder) {
  const auto whole = six_steps(folder / "whole");
  std::filesystem::create_directories(folder / "again");
  std::filesystem::copy(step(folder / "whole", 3), step(folder / "again", 3),
                        std::filesystem::copy_options::recursive);
  const auto again = six_steps(folder / "again");
  return again.losses == std::vector<double>(whole.losses.begin() + 3, whole.losses.end()) &&
         contents(step(folder / "whole", 6)) == contents(step(folder / "again", 6));
}

template <class F>
bool throws(F f) {
  try {
    f();
  } catch (const Error&) {
    return true;
  }
  return false;
}

bool a_flipped_bit_is_noticed(const path& folder) {
  six_steps(folder / "c");
  for (const auto n : {3, 6}) {
    std::string bytes = bytes_of(step(folder / "c", n) / kWeights);
    bytes[bytes.size() / 2] ^= 1;
    std::ofstream(step(folder / "c", n) / kWeights, std::ios::binary) << bytes;
  }
  return throws([&] { six_steps(folder / "c"); });
}

bool a_tensor_without_a_rule_is_noticed(const path& folder) {
  six_steps(folder / "c");
  auto table =
      train::on_disk(run_config(folder / "c", kMesh)).table(formats::ExpertLayout::per_expert);
  const auto source = checkpoint::TensorFolder::weights(step(folder / "c", 6));
  checkpoint::check_names(source, table);
  table.tensors.pop_back();
  return throws([&] { checkpoint::check_names(source, table); });
}

struct Mutant {
  std::string name;
  bool (*holds)(const path& folder);
};

TEST(CheckpointMutants, EachIsTold) {
  const std::vector<Mutant> mutants{
      {"experts_of_one_rank_saved_for_all", resume_is_identical},
      {"expert_bias_not_saved", resume_is_identical},
      {"optimizer_steps_forgotten", resume_is_identical},
      {"data_begins_anew", resume_is_identical},
      {"blocks_not_checked", a_flipped_bit_is_noticed},
      {"unexpected_tensors_skipped", a_tensor_without_a_rule_is_noticed},
  };
  for (const auto& [name, holds] : mutants) {
    const TemporaryFolder folder;
    current_mutant() = "";
    EXPECT_TRUE(holds(folder.path() / "right")) << "without " << name;
    current_mutant() = name;
    EXPECT_FALSE(holds(folder.path() / "wrong")) << name << " is not noticed";
    current_mutant() = "";
  }
}

}  // namespace
}  // namespace moesh
