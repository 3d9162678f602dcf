#include "moesh/train/commands.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/train/config.h"
#include "moesh/train/loop.h"
#include "moesh/train/verify.h"

namespace moesh::train {
namespace {

using Args = std::vector<std::string>;

const char* kUsage =
    "usage: moesh COMMAND [OPTIONS]\n"
    "\n"
    "  train          train a model; ranks are threads of this process, or MPI's under mpirun and srun\n"
    "  verify         prove that a mesh computes what one rank computes; exit code 0 only if everything agrees\n"
    "                   --steps N        optimizer steps to compare (default 2)\n"
    "                   --sweep N        every mesh of up to N ranks, instead of the configured one\n"
    "                   --json FILE      the result as JSON\n"
    "  print-config   the effective values, and where each came from\n"
    "  help           this text and every option\n"
    "\n"
    "Options: --config FILE, --section.key=value, and the short forms --mesh, --model, --steps, --dtype, --device.\n"
    "\n"
    "  moesh train --model deepseek_v3:debug --mesh dp_shard=2,tp=2,ep=4 --steps 100\n"
    "  moesh verify --model deepseek_v3:tiny --mesh tp=2,ep=2 --dtype float64\n";

// Takes `--name VALUE` or `--name=VALUE` out of the arguments.
std::optional<std::string> take(Args& args, const std::string& name) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].starts_with(name + "=")) {
      const std::string value = args[i].substr(name.size() + 1);
      args.erase(args.begin() + static_cast<std::ptrdiff_t>(i));
      return value;
    }
    if (args[i] != name) continue;
    MOESH_CHECK(i + 1 < args.size(), ErrorKind::config, name, " wants a value, as in ", name, "=...");
    const std::string value = args[i + 1];
    args.erase(args.begin() + static_cast<std::ptrdiff_t>(i), args.begin() + static_cast<std::ptrdiff_t>(i) + 2);
    return value;
  }
  return std::nullopt;
}

int take_number(Args& args, const std::string& name, int otherwise) {
  const auto text = take(args, name);
  if (!text) return otherwise;
  int value = 0;
  char rest = 0;
  MOESH_CHECK(std::sscanf(text->c_str(), "%d%c", &value, &rest) == 1 && value >= 1, ErrorKind::config, name, " is '", *text,
              "'; it takes a whole number, 1 or more");
  return value;
}

struct Loaded {
  Config config;
  ModelSetup model;
};

Loaded load(const Args& args) {
  Loaded loaded{load_config(args), {}};
  loaded.model = model_setup(loaded.config);
  return loaded;
}

int run_train(const Args& args) {
  Loaded l = load(args);
  validate(l.config, comm::num_launched_processes() > 0 ? 0 : mesh_shape(l.config).num_ranks(), l.model.facts());
  const RunSummary s = train(l.config, l.model);
  if (s.num_steps == 0) return 0;  // this process does not hold rank 0
  std::printf("%s after %lld steps: loss %.4f", s.interrupted ? "stopped" : "done", static_cast<long long>(s.num_steps),
              s.losses.back());
  if (s.entropy) std::printf(" (the data's entropy, which no model can beat: %.4f)", *s.entropy);
  std::printf("; first step after %.2f s, then %.3f s a step\n", s.first_step_seconds, s.step_seconds);
  if (!s.folder.empty()) std::printf("metrics: %s/metrics.jsonl\n", s.folder.c_str());
  return 0;
}

VerifyCase verify_case(const Loaded& l, int steps) {
  VerifyCase c;
  c.model = l.model.deepseek_v3;
  c.options = model_options(l.config);
  c.batch = l.config.data.batch_size, c.sequence = l.config.data.sequence_length;
  c.accumulation = static_cast<int>(l.config.training.gradient_accumulation_steps);
  c.steps = steps;
  c.sequence_parallel = l.config.parallelism.sequence_parallel;
  c.reshard = l.config.parallelism.fsdp_reshard_after_forward;
  c.recompute = l.config.activation_checkpoint.mode == "full";
  c.lr = l.config.optimizer.lr, c.max_norm = l.config.training.max_norm;
  return c;
}

// A case without the mesh: the reference is shared by all meshes with as many dp ranks and the same sizes.
std::string reference_key(const VerifyCase& c, int num_dp) {
  return detail::concat(num_dp, " ", c.model.num_heads, " ", c.model.num_experts, " ", c.model.num_groups, " ", c.model.top_k);
}

int run_verify(Args args) {
  const int steps = take_number(args, "--steps", 2), sweep = take_number(args, "--sweep", 0);
  const auto json = take(args, "--json");
  bool has_length = false, has_batch = false;
  for (const auto& a : args)
    has_length |= a.find("sequence_length") != std::string::npos, has_batch |= a.find("batch_size") != std::string::npos;
  Loaded l = load(args);
  // A proof wants few tokens, and an odd number of them.
  if (!has_length && l.config.origin("data.sequence_length") == "default") l.config.data.sequence_length = 7;
  if (!has_batch && l.config.origin("data.batch_size") == "default") l.config.data.batch_size = 2;
  std::vector<MeshShape> shapes;
  if (sweep > 0) {
    for (int n = 1; n <= sweep; ++n)
      for (const auto& s : all_mesh_shapes(n)) shapes.push_back(s);
  } else {
    validate(l.config, 0, l.model.facts());
    shapes.push_back(mesh_shape(l.config).validated());
  }
  comm::LaunchOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(l.config.debug.timeout_seconds * 1000));
  options.checked = l.config.debug.checked;
  options.device = at::Device(l.config.training.device == "cuda" ? "cuda:0" : l.config.training.device);

  const auto start = std::chrono::steady_clock::now();
  const bool is_terminal = isatty(STDOUT_FILENO);
  std::map<std::string, VerifyReference> references;
  std::string entries;
  size_t num_failed = 0, done = 0;
  double worst = 0, margin = 0;
  std::int64_t flipped = 0;
  for (const auto& shape : shapes) {
    const VerifyCase c = sweep > 0 ? fitted(verify_case(l, steps), shape) : verify_case(l, steps);
    const int num_dp = shape.dp_replicate * shape.dp_shard;
    const auto key = reference_key(c, num_dp);
    auto found = references.find(key);
    if (found == references.end()) found = references.emplace(key, run_reference(c, num_dp)).first;
    const VerifyReport r = verify(c, found->second, shape, options);
    worst = std::max(worst, r.worst_ratio), flipped += r.num_flipped, margin = std::max(margin, r.largest_margin);
    ++done;
    if (!r.holds()) ++num_failed;
    if (is_terminal) std::printf("\r\033[K");
    if (!r.holds() || shapes.size() == 1) std::printf("%s\n", r.describe(shape).c_str());
    if (is_terminal && shapes.size() > 1)
      std::printf("%zu of %zu meshes, %zu failed: %s", done, shapes.size(), num_failed, shape.describe().c_str()),
          std::fflush(stdout);
    entries += detail::concat(entries.empty() ? "" : ",\n", "    {\"mesh\": \"", shape.describe(),
                              "\", \"holds\": ", r.holds() ? "true" : "false", ", \"worst\": ", r.worst_ratio, ", \"first\": \"",
                              r.mismatches.empty() ? "" : r.mismatches[0].tensor, "\"}");
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (is_terminal) std::printf("\r\033[K");
  const auto c = verify_case(l, steps);
  std::printf("%s %s, %s, %d steps: %zu of %zu meshes hold (largest error: %.2g of what is allowed, tolerance %.0e), %.1f s\n",
              l.config.model.name.c_str(), l.config.model.size.c_str(), l.config.training.dtype.c_str(), steps,
              shapes.size() - num_failed, shapes.size(), worst, c.tolerance(), seconds);
  if (c.replays())
    std::printf("routing replayed from the reference: %lld choices would have flipped, largest margin %.2g\n",
                static_cast<long long>(flipped), margin);
  if (json) {
    std::ofstream file(*json);
    file << "{\n  \"holds\": " << (num_failed == 0 ? "true" : "false") << ",\n  \"seconds\": " << seconds
         << ",\n  \"meshes\": [\n"
         << entries << "\n  ]\n}\n";
    MOESH_CHECK(file.good(), ErrorKind::config, "--json ", *json, " cannot be written; choose a file that can");
  }
  return num_failed == 0 ? 0 : 1;
}

}  // namespace

int run_command(const Args& all) {
  if (all.empty() || all[0] == "help" || all[0] == "--help" || all[0] == "-h") {
    ModelSetup model{models::DeepseekV3Config::named("tiny")};
    std::printf("%s\n%s", kUsage, help_text(model.keys()).c_str());
    return all.empty() ? 2 : 0;
  }
  const Args rest(all.begin() + 1, all.end());
  if (std::find(rest.begin(), rest.end(), "--help") != rest.end()) return run_command({"help"});
  if (all[0] == "train") return run_train(rest);
  if (all[0] == "verify") return run_verify(rest);
  if (all[0] == "print-config") {
    Loaded l = load(rest);
    validate(l.config, 0, l.model.facts());
    std::printf("%s", print_config(l.config, l.model.keys()).c_str());
    return 0;
  }
  throw Error(ErrorKind::config, "there is no command '" + all[0] + "'; the commands are train, verify, print-config and help");
}

}  // namespace moesh::train
