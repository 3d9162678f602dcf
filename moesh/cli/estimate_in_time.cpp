#include "moesh/cli/estimate_in_time.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/base/terminal.h"
#include "moesh/base/text.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/cli/named_output.h"
#include "moesh/cli/sizes.h"
#include "moesh/config/merge.h"
#include "moesh/estimate/search_time.h"
#include "moesh/pipeline/draw.h"
#include "moesh/pipeline/schedule.h"

namespace moesh::cli {

using namespace config;
using namespace moesh::estimate;
namespace {

constexpr int kMostColumns = 120;

// What is asked for besides the configuration.
struct Asked {
  Cluster cluster;
  bool searches = false, draws = false;
  std::string picture;  // a file for it
  std::optional<std::string> json, memory;
};

Asked asked_of(const std::string& cluster, const Given& given) {
  Asked a{.cluster = parse_cluster(cluster)};
  a.searches = given.has("--search");
  const std::string number = given.text("--search").value_or("");
  MOESH_CHECK(number.empty() || number == std::to_string(a.cluster.num_gpus()), ErrorKind::config,
              "--search is '", number, "', and the cluster has ", a.cluster.num_gpus(),
              " GPUs, all of which are used; leave out the number");
  a.draws = given.has("--schedule");
  a.picture = given.text("--schedule").value_or("");
  const auto& names = pipeline::schedule_names();
  MOESH_CHECK(std::find(names.begin(), names.end(), a.picture) == names.end(), ErrorKind::config,
              "--schedule is '", a.picture,
              "': it draws the schedule, into a file FILE.svg if there is one; choose with "
              "--parallelism.pipeline_parallel_schedule=",
              a.picture);
  MOESH_CHECK(a.picture.empty() || a.picture.ends_with(".svg"), ErrorKind::config,
              "--schedule is '", a.picture, "': it draws an SVG; name a file that ends in .svg");
  a.json = given.text("--json"), a.memory = given.text("--memory");
  return a;
}

void print_heading(const Config& c, const Cluster& k) {
  std::printf("%s %s, %s, on %d nodes of %d %s (%s GPUs)\n", c.model.name.c_str(),
              c.model.size.c_str(), c.training.dtype.c_str(), k.num_nodes, k.gpus_per_node,
              k.gpu.c_str(), with_commas(k.num_gpus()).c_str());
  if (c.training.dtype != "bfloat16")
    std::printf(
        "compute is timed as in bfloat16, and %s takes longer than that: set "
        "--training.dtype=bfloat16\n",
        c.training.dtype.c_str());
}

// Axes larger than 1 whose groups leave the node.
std::string between_nodes(const Cluster& cluster, const MeshShape& mesh) {
  std::string text;
  for (Axes axis : {pp, dp_replicate, dp_shard, cp, tp, efsdp, ep, etp})
    if (mesh.size(axis) > 1 && group_shape(cluster, mesh, axis).crosses_nodes())
      text += (text.empty() ? "" : ", ") + to_string(axis);
  return text.empty() ? "none" : text;
}

void print(const StepTime& t, const Cluster& cluster, const estimate::PipelineOptions& options) {
  std::printf("%s\n", t.mesh.describe().c_str());
  std::printf("%s tokens a step, in %lld micro-batches\n", with_commas(t.num_tokens).c_str(),
              static_cast<long long>(t.num_micro_batches));
  std::printf("axes between nodes: %s\n", between_nodes(cluster, t.mesh).c_str());
  if (t.mesh.pp > 1)
    std::printf("schedule %s, layers of the stages: %s\n", options.schedule.c_str(),
                pipeline::plan_text(t.layers).c_str());
  std::printf("\ntime of a step%s\n",
              t.mesh.pp > 1 ? ", on the rank of pp that works longest" : "");
  const auto line = [&](const char* name, double seconds) {
    std::printf("  %-28s %10.3f s %6.1f %%\n", name, seconds, 100 * seconds / t.total);
  };
  line("compute", t.compute);
  line("tp and cp", t.tensor);
  line("ep and etp", t.experts);
  line("parameters and gradients", t.storage);
  line("bubble", t.bubble);
  line("update", t.update);
  line("total", t.total);
  std::printf("\n%s tokens/s, %.0f of a GPU; %.0f TFLOP/s of a GPU, %.1f %% of its peak\n",
              with_commas(static_cast<std::int64_t>(t.tokens_per_second())).c_str(),
              t.tokens_per_second() / t.mesh.num_ranks(), t.flops_of_a_rank() / 1e12,
              100 * t.flops_of_a_rank() / cluster.peak_flops);
  if (t.mesh.pp > 1)
    std::printf("ranks of pp wait %.1f %% of the time, all together\n", 100 * t.waiting);
  std::printf("memory of the rank that holds the most: %s\n", size_text(t.peak).c_str());
}

void print(const TimeSearch& r, const Asked& a, const Config& config, double limit) {
  MOESH_CHECK(r.num_meshes > 0, ErrorKind::config, "no mesh of ", a.cluster.num_gpus(),
              " GPUs has the degrees that are set (", mesh_shape(config).describe(),
              "), experts, heads and layers that divide by the rest, and micro-batches of ",
              config.data.batch_size, " sequences that make up a step",
              config.training.global_batch_size > 0
                  ? detail::concat(" of ", config.training.global_batch_size)
                  : "",
              "; change a degree, the cluster, or training.global_batch_size");
  if (r.num_timed > 0)
    std::printf("pipelines have the schedule %s\n",
                config.parallelism.pipeline_parallel_schedule.c_str());
  std::printf("%d meshes, %d timed, %d dry runs of a few layers; ", r.num_meshes, r.num_timed,
              r.num_runs);
  if (r.best.empty()) {
    std::printf(
        "none fits into %s a rank; try more GPUs, a smaller batch, or "
        "--activation_checkpoint.mode=full\n",
        size_text(limit).c_str());
    return;
  }
  std::printf("the fastest %zu that fit into %s a rank\n\n", r.best.size(),
              size_text(limit).c_str());
  std::printf("%12s %8s %7s %8s %7s %7s %11s  mesh\n", "tokens/s", "of a GPU", "peak %", "bubble %",
              "comm %", "micro", "memory");
  for (const StepTime& t : r.best)
    std::printf("%12s %8.0f %7.1f %8.1f %7.1f %7lld %11s  %s\n",
                with_commas(static_cast<std::int64_t>(t.tokens_per_second())).c_str(),
                t.tokens_per_second() / t.mesh.num_ranks(),
                100 * t.flops_of_a_rank() / t.peak_flops, 100 * t.bubble / t.total,
                100 * (t.tensor + t.experts + t.storage) / t.total,
                static_cast<long long>(t.num_micro_batches), size_text(t.peak).c_str(),
                t.mesh.describe().c_str());
}

void write_json(const std::string& path, const std::vector<StepTime>& all) {
  formats::JsonList estimates;
  for (const StepTime& t : all) estimates.push_back(to_json(t));
  const formats::JsonValue file{formats::JsonObject{{"estimates", {std::move(estimates)}}}};
  NamedOutput("--json", path).write(formats::to_json(file) + "\n");
}

// On a terminal one line that changes; elsewhere a line every few seconds.
Progress show_progress() {
  using Clock = std::chrono::steady_clock;
  const bool is_terminal = isatty(STDERR_FILENO) == 1;
  return [is_terminal, last = Clock::now()](int done, int all, const TimeSearch& r) mutable {
    const bool is_end = done == all;
    const double since = std::chrono::duration<double>(Clock::now() - last).count();
    if (!is_end && since < (is_terminal ? 0.2 : 5)) return;
    last = Clock::now();
    std::fprintf(
        stderr, "%s%d of %d ways to split a layer, %d meshes timed, best %s tokens/s%s",
        is_terminal ? "\r" : "", done, all, r.num_timed,
        r.best.empty()
            ? "-"
            : with_commas(static_cast<std::int64_t>(r.best[0].tokens_per_second())).c_str(),
        is_terminal && !is_end ? " " : "\n");
  };
}

void draw(Profiler& profiler, const Asked& a, const estimate::PipelineOptions& pipe,
          const MeshShape& mesh, const StepTime& time) {
  const int most = 2 * mesh.pp + 1;  // enough to see how it begins, goes on and ends
  const auto s = simulated(profiler, a.cluster, mesh, pipe, most);
  const auto drawn = std::min<std::int64_t>(time.num_micro_batches, most);
  if (a.picture.empty()) {
    std::printf("\n%lld of %lld micro-batches (--schedule FILE.svg draws every action)\n%s",
                static_cast<long long>(drawn), static_cast<long long>(time.num_micro_batches),
                pipeline::draw_text(s, kMostColumns).c_str());
    return;
  }
  char note[160];
  std::snprintf(note, sizeof note,
                "ranks wait %.1f %% of this, %.1f %% of a whole step; activations: at most %s",
                100 * s.bubble_fraction(), 100 * time.waiting,
                size_text(*std::max_element(s.peak.begin(), s.peak.end())).c_str());
  NamedOutput("--schedule", a.picture)
      .write(pipeline::draw_svg(s,
                                detail::concat(pipe.schedule, ", pp ", mesh.pp, ", ", drawn, " of ",
                                               time.num_micro_batches, " micro-batches"),
                                note));
  std::printf("schedule: %s\n", printable(a.picture).c_str());
}

}  // namespace

int run_estimate_in_time(const std::string& cluster, const Given& given) {
  const Asked a = asked_of(cluster, given);
  const Config config = load_config(given.rest());
  const double limit = a.memory ? static_cast<double>(parse_size(*a.memory)) : a.cluster.memory;
  const MeshShape mesh = mesh_shape(config);
  const estimate::PipelineOptions pipe = estimate::pipeline_options(config);
  print_heading(config, a.cluster);
  const auto start = std::chrono::steady_clock::now();
  int code = 0;
  naming_sizes(config, [&] {
    Profiler profiler(config);
    if (a.searches) {
      const TimeSearch r =
          search_time(profiler, a.cluster, mesh, pipe, limit, kMostListed, show_progress());
      print(r, a, config, limit);
      std::printf("\n%.1f s\n",
                  std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      if (a.json) write_json(*a.json, r.best);
      if (a.draws && !r.best.empty()) draw(profiler, a, pipe, r.best[0].mesh, r.best[0]);
      code = r.best.empty() ? 1 : 0;
      return;
    }
    check_fills(mesh, a.cluster);
    const StepTime t = step_time(profiler, a.cluster, mesh, pipe);
    print(t, a.cluster, pipe);
    std::printf("%s %s\n", t.peak <= limit ? "fits into" : "does not fit into",
                size_text(limit).c_str());
    if (a.json) write_json(*a.json, {t});
    if (a.draws) draw(profiler, a, pipe, mesh, t);
    code = t.peak <= limit ? 0 : 1;
  });
  return code;
}

}  // namespace moesh::cli
