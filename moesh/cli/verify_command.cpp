#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "moesh/base/error.h"
#include "moesh/checkpoint/load.h"
#include "moesh/cli/arguments.h"
#include "moesh/cli/commands.h"
#include "moesh/config/options.h"
#include "moesh/formats/json.h"
#include "moesh/models/disk.h"
#include "moesh/verify/dump.h"
#include "moesh/verify/golden.h"
#include "moesh/verify/verify.h"

namespace moesh::cli {

using namespace config;
using namespace train;
using namespace moesh::verify;
namespace {

VerifyCase verify_case(const Loaded& l, int steps) {
  VerifyCase c;
  c.model = l.model.config;
  c.options = model_options(l.config);
  c.batch = l.config.data.batch_size, c.sequence = l.config.data.sequence_length;
  c.accumulation = static_cast<int>(l.config.training.gradient_accumulation_steps);
  c.steps = steps;
  c.sequence_parallel = l.config.parallelism.sequence_parallel;
  c.reshard = l.config.parallelism.fsdp_reshard_after_forward;
  c.recompute = l.config.activation_checkpoint.mode == "full";
  c.lr = l.config.optimizer.lr, c.max_norm = l.config.training.max_norm;
  c.optimizer = l.config.optimizer;
  // A proof wants the losses and the bias to count; what the user says counts more.
  const auto& moe = l.config.moe;
  const auto is_set = [&](const char* option) { return l.config.origin(option) != "default"; };
  if (is_set("moe.switch_loss_weight")) c.auxiliary.switch_weight = moe.switch_loss_weight;
  if (is_set("moe.sequence_loss_weight")) c.auxiliary.sequence_weight = moe.sequence_loss_weight;
  if (is_set("moe.z_loss_weight")) c.auxiliary.z_weight = moe.z_loss_weight;
  if (is_set("moe.load_balance_coeff")) c.bias_coeff = moe.load_balance_coeff;
  return c;
}

// A case without the mesh: the reference is shared by all meshes with as many dp ranks and the same
// sizes.
std::string reference_key(VerifyCase c, int num_dp) {
  std::string key = std::to_string(num_dp);
  for (const ModelKey& k : models::keys(c.model)) key += " " + formats::to_toml(read(k));
  return key;
}

// The result of a sweep by number of ranks.
struct SweepRow {
  size_t num_meshes = 0, num_held = 0;
  double worst = 0, seconds = 0;
};

void print_table(const std::map<int, SweepRow>& rows) {
  std::printf("%7s%9s%7s%36s%10s\n", "ranks", "meshes", "hold", "largest error / what is allowed",
              "seconds");
  for (const auto& [ranks, row] : rows)
    std::printf("%7d%9zu%7zu%36.2g%10.1f\n", ranks, row.num_meshes, row.num_held, row.worst,
                row.seconds);
}

// The checkpoint decides which model it is, and the file how many tokens there are.
int run_golden(const Args& args, const std::string& file) {
  Loaded l = load(args);
  const std::filesystem::path folder = l.config.checkpoint.initial_load;
  MOESH_CHECK(
      !folder.empty(), ErrorKind::config, "--golden ", file,
      " wants the checkpoint for which it was recorded: add --checkpoint.initial_load=FOLDER");
  l.model.config =
      models::config_of(checkpoint::read_config(folder), (folder / "config.json").string());
  const Golden golden = read_golden(file, folder, l.model.config);
  l.config.data.sequence_length = golden.input_ids_BL.size(1);
  validate(l.config, 0, l.model.facts());
  const auto start = std::chrono::steady_clock::now();
  const VerifyReport r = verify_golden(golden, folder, l.model, l.config);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!r.is_first) return r.holds() ? 0 : 1;  // another process speaks
  std::printf("%s\n", r.describe(mesh_shape(l.config)).c_str());
  std::printf(
      "%s of %s, %s: loss %.6f, %zu tensors against %s (largest error: %.2g of what is allowed, tolerance %.0e), %.1f s\n",
      models::name(l.model.config).c_str(), folder.c_str(), l.config.training.dtype.c_str(),
      golden["loss"].item<double>(), golden.tensors.size(), file.c_str(), r.worst_ratio,
      golden_tolerance(l.config), seconds);
  return r.holds() ? 0 : 1;
}

}  // namespace

int run_verify(Args args) {
  if (const auto golden = take(args, "--golden")) return run_golden(args, *golden);
  const int steps = take_number(args, "--steps", 2), sweep = take_number(args, "--sweep", 0);
  const auto json = take(args, "--json"), dump = take(args, "--dump");
  Loaded l = load(args);
  // A proof wants few tokens, and an odd number of them.
  if (l.config.origin("data.sequence_length") == "default") l.config.data.sequence_length = 7;
  validate(l.config, 0, l.model.facts());
  std::vector<MeshShape> shapes{mesh_shape(l.config)};
  if (sweep > 0) {
    MOESH_CHECK(shapes[0].num_ranks() == 1, ErrorKind::config, "--sweep ", sweep,
                " goes through every mesh of up to ", sweep,
                " ranks, and a mesh is given, too: ", shapes[0].describe(),
                "; leave one of them out");
    shapes.clear();
    for (int n = 1; n <= sweep; ++n)
      for (const auto& s : all_mesh_shapes(n)) shapes.push_back(s);
  }
  if (dump) {
    MOESH_CHECK(sweep == 0, ErrorKind::config, "--dump ", *dump,
                " writes the tensors of one mesh; leave --sweep out");
    std::error_code failed;
    std::filesystem::create_directories(*dump, failed);
    MOESH_CHECK(std::filesystem::is_directory(*dump), ErrorKind::config, "--dump ", *dump,
                " is no folder and cannot become one");
  }
  std::ofstream file;
  if (json) {
    file.open(*json);
    MOESH_CHECK(file.good(), ErrorKind::config, "--json ", *json,
                " cannot be written; choose a file that can");
  }
  const comm::LaunchOptions options = launch_options(l.config);

  const auto start = std::chrono::steady_clock::now();
  const bool is_terminal = isatty(STDOUT_FILENO) && comm::num_launched_processes() == 0;
  std::map<std::string, VerifyReference> references;
  std::string entries;
  std::map<int, SweepRow> rows;
  bool is_first = true;
  size_t num_failed = 0, done = 0;
  double worst = 0, margin = 0;
  std::int64_t flipped = 0;
  for (const auto& shape : shapes) {
    const auto begin = std::chrono::steady_clock::now();
    const VerifyCase c = sweep > 0 ? fitted(verify_case(l, steps), shape) : verify_case(l, steps);
    const int num_dp = shape.dp_replicate * shape.dp_shard;
    const auto key = reference_key(c, num_dp);
    auto found = references.find(key);
    if (found == references.end()) found = references.emplace(key, run_reference(c, num_dp)).first;
    NamedTensors values;
    const VerifyReport r =
        verify::verify(c, found->second, shape, options, dump ? &values : nullptr);
    if (dump) {
      write_tensors(*dump + "/one_rank.safetensors", found->second);
      write_tensors(*dump + "/mesh.safetensors", values);
    }
    worst = std::max(worst, r.worst_ratio), flipped += r.num_flipped,
    margin = std::max(margin, r.largest_margin);
    ++done;
    if (!r.holds()) ++num_failed;
    auto& row = rows[shape.num_ranks()];
    ++row.num_meshes, row.num_held += r.holds(), row.worst = std::max(row.worst, r.worst_ratio);
    row.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    is_first = r.is_first;
    if (!is_first) continue;  // another process speaks
    if (is_terminal) std::printf("\r\033[K");
    if (!r.holds() || shapes.size() == 1) std::printf("%s\n", r.describe(shape).c_str());
    if (is_terminal && shapes.size() > 1)
      std::printf("%zu of %zu meshes, %zu failed: %s", done, shapes.size(), num_failed,
                  shape.describe().c_str()),
          std::fflush(stdout);
    if (!json) continue;
    entries += detail::concat(
        entries.empty() ? "" : ",\n", "    {\"mesh\": ", formats::json_quoted(shape.describe()),
        ", \"holds\": ", r.holds() ? "true" : "false",
        ", \"worst\": ", std::isfinite(r.worst_ratio) ? std::to_string(r.worst_ratio) : "null",
        ", \"first\": ", formats::json_quoted(r.mismatches.empty() ? "" : r.mismatches[0].tensor),
        ", \"error\": ", formats::json_quoted(r.error), "}");
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!is_first) return num_failed == 0 ? 0 : 1;
  if (is_terminal) std::printf("\r\033[K");
  if (shapes.size() > 1) print_table(rows);
  const auto c = verify_case(l, steps);
  std::printf(
      "%s %s, %s, %d steps: %zu of %zu meshes hold (largest error: %.2g of what is allowed, tolerance %.0e), %.1f s\n",
      l.config.model.name.c_str(), l.config.model.size.c_str(), l.config.training.dtype.c_str(),
      steps, shapes.size() - num_failed, shapes.size(), worst, c.tolerance(), seconds);
  if (c.replays())
    std::printf(
        "routing replayed from the reference: %lld choices would have flipped, largest margin %.2g\n",
        static_cast<long long>(flipped), margin);
  if (json) {
    file << "{\n  \"holds\": " << (num_failed == 0 ? "true" : "false")
         << ",\n  \"seconds\": " << seconds << ",\n  \"meshes\": [\n"
         << entries << "\n  ]\n}\n";
    file.flush();
    MOESH_CHECK(file.good(), ErrorKind::config, "--json ", *json,
                " could not be written to its end; is the disk full?");
  }
  return num_failed == 0 ? 0 : 1;
}

}  // namespace moesh::cli
