// Checks that mistakes which checkpoints have been known to make must not pass: a run that is
// resumed, and files that must not load.

#include "moesh/checkpoint/load.h"
#include "tests/checkpoint/support.h"
#include "tests/mutants/check.h"

namespace moesh {
namespace {

using mutants::Check;
using mutants::Settings;
using std::filesystem::path;

constexpr const char* kMesh = "dp_shard=2,tp=2,ep=2";
constexpr const char* kWeights = "model-00001-of-00001.safetensors";

path step_folder(const path& folder, std::int64_t n) { return folder / checkpoint::step_name(n); }

train::RunSummary six_steps(const path& folder, const std::string& model = "deepseek_v3") {
  return run(folder, kMesh,
             {"--model=" + model, "--steps=6", "--checkpoint.interval=3", "--optimizer.lr=1e-2",
              "--moe.load_balance_coeff=0.05"});
}

// A run that resumes from its third step is the run that was never stopped.
std::string resumed(const path& folder, const std::string& model) {
  const auto whole = six_steps(folder / "whole", model);
  std::filesystem::create_directories(folder / "again");
  std::filesystem::copy(step_folder(folder / "whole", 3), step_folder(folder / "again", 3),
                        std::filesystem::copy_options::recursive);
  const auto again = six_steps(folder / "again", model);
  if (again.losses != std::vector<double>(whole.losses.begin() + 3, whole.losses.end()))
    return "the losses differ";
  const bool same =
      contents(step_folder(folder / "whole", 6)) == contents(step_folder(folder / "again", 6));
  return same ? "" : "the last checkpoints differ";
}

template <class F>
std::string must_throw(F f) {
  try {
    f();
  } catch (const Error&) {
    return "";
  }
  return "it loads";
}

std::string flipped_bit(const path& folder) {
  six_steps(folder / "c");
  for (const auto n : {3, 6}) {
    std::string bytes = bytes_of(step_folder(folder / "c", n) / kWeights);
    bytes[bytes.size() / 2] ^= 1;
    std::ofstream(step_folder(folder / "c", n) / kWeights, std::ios::binary) << bytes;
  }
  return must_throw([&] { six_steps(folder / "c"); });
}

std::string tensor_without_rule(const path& folder) {
  six_steps(folder / "c");
  auto table =
      train::on_disk(run_config(folder / "c", kMesh)).table(formats::ExpertLayout::per_expert);
  const auto source = checkpoint::TensorFolder::weights(step_folder(folder / "c", 6));
  checkpoint::check_names(source, table);
  table.tensors.pop_back();
  return must_throw([&] { checkpoint::check_names(source, table); });
}

template <std::string (*look)(const path& folder)>
Check in_fresh_folder(Settings&) {
  return [] { return look(TemporaryFolder().path()); };
}

// llama4: a model whose files have no place for the expert bias.
const mutants::Provide resume("resume", [](Settings& settings) -> Check {
  const std::string model = settings.take("llama4") != 0 ? "llama4" : "deepseek_v3";
  return [model]() -> std::string {
    const TemporaryFolder folder;
    try {
      return resumed(folder.path(), model);
    } catch (const Error& e) {
      return std::string("it throws: ") + e.what();
    }
  };
});
const mutants::Provide flipped("flipped_bit", in_fresh_folder<flipped_bit>);
const mutants::Provide without_rule("tensor_without_rule", in_fresh_folder<tensor_without_rule>);

}  // namespace
}  // namespace moesh
