#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/base/timeline.h"
#include "moesh/cli/command_line.h"
#include "moesh/cli/commands.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/config/options.h"
#include "moesh/formats/json.h"
#include "moesh/verify/compare.h"
#include "moesh/verify/golden.h"
#include "moesh/verify/verify_all.h"

namespace moesh::cli {

using namespace config;
using namespace moesh::verify;
namespace {

using Clock = std::chrono::steady_clock;

// Where a rank throws, the first may never have begun.
bool prints(const VerifyReport& r) { return r.is_first || !r.error.empty(); }

int exit_code_of(const VerifyReport& r) {
  return static_cast<int>(r.holds() ? ExitCode::done : ExitCode::does_not_hold);
}

void print_flips(std::int64_t count, double largest_margin) {
  std::printf(
      "routing replayed from the reference: %lld choices would have flipped, largest margin %.2g\n",
      static_cast<long long>(count), largest_margin);
}

int run_golden(const Arguments& given, const std::string& file) {
  for (const char* name :
       {"--steps", "--sweep", "--sample", "--sample-seed", "--shard", "--json", "--dump"})
    MOESH_CHECK(
        !given.has(name), ErrorKind::config, name, " ", given.text(name).value_or(""),
        " and --golden ", file,
        ": with a golden file verify compares its one step on one mesh, and only prints the "
        "result; leave one of them out");
  const Golden golden = read_golden(file, read_arguments(given.rest()));
  const Config& config = golden.config;
  const auto start = Clock::now();
  VerifyReport r;
  naming_sizes(config, [&] { r = verify_golden(golden); });
  if (!prints(r)) return exit_code_of(r);  // another process does
  std::printf("%s\n", r.describe(mesh_shape(config)).c_str());
  std::printf(
      "%s of %s, %s: loss %.6f, %zu tensors against %s (largest error: %.2g of what is allowed), "
      "%.1f s\n",
      config.model.name.c_str(), printable(config.checkpoint.initial_load).c_str(),
      config.training.dtype.c_str(), golden["loss"].item<double>(), golden.tensors.size(),
      printable(file).c_str(), r.worst_ratio, seconds_since(start));
  if (golden.replays()) print_flips(r.num_flipped, r.largest_margin);
  if (r.num_vague > 0)
    std::printf("rounding may change %lld of these tensors by half: float32 tells more of them\n",
                static_cast<long long>(r.num_vague));
  return exit_code_of(r);
}

// Arguments of the command besides the configuration.
struct Request {
  int steps;
  std::optional<Sweep> sweep;
  std::optional<std::string> json, dump;
};

// --sweep, --sample, --sample-seed, --shard.
std::optional<Sweep> sweep_of(const Arguments& given) {
  const auto ranks = given.text("--sweep"), shard = given.text("--shard");
  const int count = given.number("--sample", 0), seed = given.number("--sample-seed", 0);
  MOESH_CHECK(ranks || (!shard && count == 0), ErrorKind::config,
              "--shard and --sample choose from the meshes of --sweep; give it, as in --sweep 8");
  MOESH_CHECK(count > 0 || seed == 0, ErrorKind::config, "--sample-seed is ", seed,
              " and there is no --sample; give one, as in --sample 40");
  if (!ranks) return std::nullopt;
  Sweep sweep = parse_sweep(*ranks);
  if (count > 0) sweep.sample = MeshSample{count, static_cast<std::uint64_t>(seed)};
  if (shard) sweep.shard = parse_shard(*shard);
  return sweep;
}

void check_dump(const Request& request) {
  if (!request.dump) return;
  MOESH_CHECK(!request.sweep, ErrorKind::config, "--dump ", *request.dump,
              " writes the tensors of one mesh; leave --sweep out");
  std::error_code failed;
  std::filesystem::create_directories(*request.dump, failed);
  MOESH_CHECK(std::filesystem::is_directory(*request.dump, failed), ErrorKind::config, "--dump ",
              *request.dump, " is not a folder and cannot become one");
}

// The result of some meshes.
struct SweepRow {
  size_t num_meshes = 0, num_held = 0;
  double worst = 0, seconds = 0;

  void add(const Verified& v) {
    ++num_meshes, num_held += v.report.holds();
    worst = std::max(worst, v.report.worst_ratio), seconds += v.seconds;
  }
};

// The result of all meshes.
struct Totals {
  std::map<int, SweepRow> rows;  // by number of ranks
  SweepRow all;
  double margin = 0;
  std::int64_t num_flipped = 0;
  LeftOut left_out;      // the most of each
  int exit_code = 0;     // of the first mesh that does not hold
  bool is_first = true;  // this process holds rank 0
  formats::JsonList meshes;

  void add(const Verified& v) {
    const VerifyReport& r = v.report;
    rows[mesh_shape(v.config).num_ranks()].add(v);
    all.add(v);
    if (exit_code == 0) exit_code = exit_code_of(r);
    margin = std::max(margin, r.largest_margin), num_flipped += r.num_flipped;
    const auto most = [&](std::int64_t LeftOut::* count) {
      left_out.*count = std::max(left_out.*count, r.left_out.*count);
    };
    most(&LeftOut::steps), most(&LeftOut::tensors), most(&LeftOut::gradients),
        most(&LeftOut::against_float64);
    is_first = prints(r);
    meshes.push_back(to_json(v));
  }
};

void print_table(const std::map<int, SweepRow>& rows) {
  std::printf("%7s%9s%7s%36s%10s\n", "ranks", "meshes", "hold", "largest error / what is allowed",
              "seconds");
  for (const auto& [ranks, row] : rows)
    std::printf("%7d%9zu%7zu%36.2g%10.1f\n", ranks, row.num_meshes, row.num_held, row.worst,
                row.seconds);
}

Totals verify_and_print(const std::vector<Config>& configs, const Request& request) {
  const bool is_terminal = isatty(STDOUT_FILENO) && comm::num_launched_processes() == 0;
  Totals totals;
  verify_all(configs, request.steps, request.dump.has_value(), [&](const Verified& v) {
    if (request.dump) {
      write_tensors(*request.dump + "/one_rank.safetensors", v.reference);
      write_tensors(*request.dump + "/mesh.safetensors", v.values);
    }
    totals.add(v);
    const VerifyReport& r = v.report;
    const MeshShape shape = mesh_shape(v.config);
    if (!prints(r)) return;  // another process does
    if (is_terminal) std::printf("\r\033[K");
    if (!r.holds() || configs.size() == 1) std::printf("%s\n", r.describe(shape).c_str());
    if (!r.holds() && shape.cp > 1)
      std::printf("  with the cut %s of sequences\n",
                  v.config.parallelism.context_parallel_cut.c_str());
    if ((!r.holds() || configs.size() == 1) && shape.pp > 1)
      std::printf("  with the schedule %s, %lld micro-batches, model.tie_embeddings %s\n",
                  v.config.parallelism.pipeline_parallel_schedule.c_str(),
                  static_cast<long long>(num_micro_batches(v.config)),
                  is_tied(v.config) ? "true" : "false");
    if (!is_terminal || configs.size() == 1) return;
    std::printf("%zu of %zu meshes, %zu failed: %s", totals.all.num_meshes, configs.size(),
                totals.all.num_meshes - totals.all.num_held, shape.describe().c_str());
    std::fflush(stdout);
  });
  if (is_terminal) std::printf("\r\033[K");
  return totals;
}

}  // namespace

int run_verify(const Arguments& given) {
  if (const auto golden = given.text("--golden")) return run_golden(given, *golden);
  const Request request{.steps = given.number("--steps", 2),
                        .sweep = sweep_of(given),
                        .json = given.text("--json"),
                        .dump = given.text("--dump")};
  const Config config = load_config(given.rest(), verify_defaults(request.steps));
  const std::vector<Config> configs = meshes_of(config, request.sweep);
  check_dump(request);
  std::optional<NamedOutput> json;
  if (request.json) json.emplace("--json", *request.json);
  const auto start = Clock::now();
  Totals t;
  naming_sizes(config, [&] {
    check_fits(config);
    t = verify_and_print(configs, request);
  });
  const double seconds = seconds_since(start);
  const bool all_hold = t.all.num_held == t.all.num_meshes;
  if (!t.is_first) return t.exit_code;
  if (configs.size() > 1) print_table(t.rows);
  std::printf(
      "%s, %s, %d steps: %zu of %zu meshes hold (largest error: %.2g of what is allowed), %.1f s\n",
      model_title(config).c_str(), config.training.dtype.c_str(), request.steps, t.all.num_held,
      t.all.num_meshes, t.all.worst, seconds);
  if (VerifyCase{config}.replays()) print_flips(t.num_flipped, t.margin);
  if (t.left_out.any())
    std::printf("not compared%s: %s\n", configs.size() > 1 ? ", of the mesh with most of them" : "",
                t.left_out.describe().c_str());
  const auto alike =
      std::ranges::find_if(configs, [](const Config& x) { return !why_cut_alike(x).empty(); });
  if (alike != configs.end())
    std::printf(
        "one rank has the micro-batches of the mesh (%s); other cuts are not compared: %s\n",
        mesh_shape(*alike).describe().c_str(), why_cut_alike(*alike).c_str());
  if (json)
    json->write(
        formats::to_json({formats::JsonObject{
            {"holds", {all_hold}}, {"seconds", {seconds}}, {"meshes", {std::move(t.meshes)}}}}) +
        "\n");
  return t.exit_code;
}

}  // namespace moesh::cli
