#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/base/timeline.h"
#include "moesh/cli/command_line.h"
#include "moesh/cli/commands.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/config/merge.h"
#include "moesh/config/options.h"
#include "moesh/estimate/estimate.h"
#include "moesh/estimate/search_time.h"
#include "moesh/pipeline/schedule.h"
#include "moesh/pipeline/simulate.h"

namespace moesh::cli {

using namespace config;
using namespace moesh::estimate;
namespace {

constexpr size_t kMostListed = 10;
constexpr int kMostColumns = 120;

// Arguments besides the configuration.
struct Asked {
  Cluster cluster;
  bool searches = false, draws = false, overlaps = false;
  std::string picture;  // a file for it
  std::optional<std::string> json, memory;
};

// The named cluster, or the number of H100 of --search.
Cluster cluster_of(const Arguments& given) {
  const auto named = given.text("--cluster"), number = given.text("--search");
  if (named) {
    const Cluster cluster = parse_cluster(*named);
    MOESH_CHECK(number.value_or("").empty() || *number == std::to_string(cluster.num_gpus()),
                ErrorKind::config, "--search is '", *number, "', and the cluster has ",
                cluster.num_gpus(), " GPUs, all of which are used; leave out the number");
    return cluster;
  }
  MOESH_CHECK(
      !number->empty(), ErrorKind::config,
      "--search needs to know what to search on: the number of ranks, as in --search 64, or "
      "a cluster, as in --cluster h100x8:8");
  return assumed_cluster(given.number("--search", 1));
}

Asked asked_of(const Arguments& given) {
  Asked a{.cluster = cluster_of(given)};
  a.searches = given.has("--search");
  a.draws = given.has("--schedule"), a.overlaps = given.has("--overlap");
  MOESH_CHECK(!a.overlaps || !a.searches, ErrorKind::config,
              "--overlap compares the ways of one mesh, and --search tries them on all; leave out "
              "one");
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

void print_heading(const Config& c, const Cluster& k, bool is_assumed) {
  std::printf("%s, %s, on %s of %d %s (%s)%s\n", model_title(c).c_str(), c.training.dtype.c_str(),
              counted(k.num_nodes, "node").c_str(), k.gpus_per_node, k.gpu.c_str(),
              counted(k.num_gpus(), "GPU").c_str(),
              is_assumed ? ", which is assumed: name yours with --cluster" : "");
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

void print(const StepTime& t, const Cluster& cluster) {
  std::printf("%s\n", t.mesh.describe().c_str());
  std::printf("%s tokens a step, in %lld micro-batches\n", with_commas(t.num_tokens).c_str(),
              static_cast<long long>(t.num_micro_batches));
  std::printf("axes between nodes: %s\n", between_nodes(cluster, t.mesh).c_str());
  if (t.mesh.pp > 1)
    std::printf("schedule %s, layers of the stages: %s\n", t.schedule.c_str(),
                pipeline::plan_text(t.layers).c_str());
  std::printf("\ntime of a step%s\n",
              t.mesh.pp > 1 ? ", on the rank of pp that works longest" : "");
  const auto line = [&](const char* name, double seconds) {
    std::printf("  %-28s %10.3f s %6.1f %%\n", name, seconds, 100 * seconds / t.total);
  };
  line("compute", t.compute);
  const auto part = [&](const char* name, double seconds) {
    if (seconds > 0) line(detail::concat("  ", name).c_str(), seconds);
  };
  part("products of experts", t.kernels.experts);
  part("attention", t.kernels.attention);
  part("other products", t.kernels.dense);
  part("passes over memory", t.kernels.passes);
  part("of these: embedding, head", t.ends);
  part("of these: once more", t.again);
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

// A word for a shell.
std::string quoted(const std::string& word) {
  const bool is_plain = word.find_first_not_of(
                            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                            "-_=.,:/+@%") == std::string::npos;
  if (is_plain && !word.empty()) return word;
  std::string out = "'";
  for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// Without the degrees of the mesh, which become those that were found.
Args without_mesh(const Args& args) {
  Args kept;
  for (std::size_t i = 0; i < args.size(); ++i) {
    const std::string name = args[i].substr(0, args[i].find('='));
    const auto is_degree = [&](const Degree& d) { return name == "--" + d.option; };
    if (name != "--mesh" && std::none_of(degrees().begin(), degrees().end(), is_degree))
      kept.push_back(args[i]);
    else if (name == args[i])
      ++i;  // its value is the next word
  }
  return kept;
}

// The request, the choices and the results.
std::string ready_command(const Args& args, const std::vector<std::string>& chosen,
                          const Config& config, const StepTime& best) {
  std::string text = "moesh train";
  for (const std::string& arg : without_mesh(args)) text += " " + quoted(arg);
  const auto add = [&](const std::string& option, const std::string& value) {
    text += " --" + option + "=" + quoted(value);
  };
  for (const std::string& option : chosen) {
    const Value value = find_option(option)->get(config);
    const auto* word = std::get_if<std::string>(&value);
    add(option, word ? *word : formats::to_toml(value));
  }
  for (const auto& [option, value] : searched_options(config, best)) add(option, value);
  return text + " --mesh " + mesh_argument(best.mesh);
}

// How rows travel to their experts; "+": behind the work of another micro-batch.
std::string rows_text(const StepTime& t) {
  if (t.mesh.ep * t.mesh.etp == 1) return "-";
  return t.dispatcher + (t.overlap_experts ? " +" : "");
}

void print(const TimeSearch& r, const Asked& a, const Config& config, double limit) {
  MOESH_CHECK(r.num_meshes > 0, ErrorKind::config, "no mesh of ", a.cluster.num_gpus(),
              " GPUs has the degrees that are set (", mesh_shape(config).describe(),
              "), experts, heads and layers that are divisible by the rest, and micro-batches of ",
              config.data.batch_size, " sequences that make up a step",
              config.training.global_batch_size > 0
                  ? detail::concat(" of ", config.training.global_batch_size)
                  : "",
              "; change a degree, the cluster, or training.global_batch_size");
  std::printf("%s meshes, %s timed, %s of a few layers; ", with_commas(r.num_meshes).c_str(),
              counted(r.num_timed, "step").c_str(), counted(r.num_runs, "dry run").c_str());
  if (r.best.empty()) {
    std::printf(
        "none fits into %s a rank; try more GPUs, a smaller batch, or --activation_checkpoint.mode=full\n",
        size_text(limit).c_str());
    return;
  }
  std::printf("the fastest that fit into %s a rank:\n\n", size_text(limit).c_str());
  std::printf("%12s %8s %7s %8s %6s %11s %6s %6s  %-10s %-16s %-12s %6s  --mesh\n", "tokens/s",
              "of a GPU", "peak %", "bubble %", "comm %", "memory", "batch", "micro", "recompute",
              "schedule", "rows", "alike");
  for (std::size_t i = 0; i < r.best.size(); ++i) {
    const StepTime& t = r.best[i];
    std::printf("%12s %8.0f %7.1f %8.1f %6.1f %11s %6lld %6lld  %-10s %-16s %-12s %6d  %s\n",
                with_commas(static_cast<std::int64_t>(t.tokens_per_second())).c_str(),
                t.tokens_per_second() / t.mesh.num_ranks(),
                100 * t.flops_of_a_rank() / t.peak_flops, 100 * t.bubble / t.total,
                100 * (t.tensor + t.experts + t.storage) / t.total, size_text(t.peak).c_str(),
                static_cast<long long>(t.batch_size), static_cast<long long>(t.num_micro_batches),
                t.recompute.c_str(), t.mesh.pp > 1 ? t.schedule.c_str() : "-", rows_text(t).c_str(),
                r.num_alike[i], mesh_argument(t.mesh).c_str());
  }
  std::printf(
      "\nbatch is data.batch_size, micro the micro-batches of a step, rows the dispatcher, with + "
      "behind\nthe work of another micro-batch (parallelism.overlap_experts); alike counts what was "
      "found within a per cent of a\nrow, which shows the simplest mesh of these.\n");
}

void print_ways(const std::vector<StepTime>& ways) {
  std::printf("\n%-12s %-16s %10s %14s %14s %11s\n", "dispatcher", "overlap_experts", "seconds",
              "of ep and etp", "tokens/s a GPU", "memory");
  for (const StepTime& t : ways)
    std::printf("%-12s %-16s %10.3f %14.3f %14.0f %11s\n", t.dispatcher.c_str(),
                t.overlap_experts ? "true" : "false", t.total, t.experts,
                t.tokens_per_second() / t.mesh.num_ranks(), size_text(t.peak).c_str());
}

void write_json(const std::string& path, formats::JsonList estimates) {
  const formats::JsonValue file{formats::JsonObject{{"estimates", {std::move(estimates)}}}};
  NamedOutput("--json", path).write(formats::to_json(file) + "\n");
}
void write_json(const std::string& path, const std::vector<StepTime>& all) {
  formats::JsonList estimates;
  for (const StepTime& t : all) estimates.push_back(to_json(t));
  write_json(path, std::move(estimates));
}

// The sizes of a step, and which of them the user has not set.
void print_sizes(const Config& c, const std::vector<std::string>& chosen) {
  std::printf("sequences of %s tokens", with_commas(c.data.sequence_length).c_str());
  if (c.training.global_batch_size > 0)
    std::printf(", %s (%s tokens) a step", with_commas(c.training.global_batch_size).c_str(),
                with_commas(c.training.global_batch_size * c.data.sequence_length).c_str());
  std::string names;
  for (const std::string& name : chosen) names += (names.empty() ? "" : ", ") + name;
  std::printf("%s%s\n", chosen.empty() ? "" : "; chosen here, set them yourself: ", names.c_str());
}

// The configuration of a step that was found.
Config with_found(const Config& config, const StepTime& found) {
  Settings settings = mesh_settings(found.mesh, "--search");
  for (const auto& [option, value] : searched_options(config, found))
    settings.push_back({option, value, {"--search"}, true});
  return changed(config, settings);
}

// On a terminal one line that changes; elsewhere a line every few seconds.
Progress show_progress() {
  using Clock = std::chrono::steady_clock;
  const bool is_terminal = isatty(STDERR_FILENO) == 1;
  return [is_terminal, last = Clock::now()](int done, int all, const TimeSearch& r) mutable {
    const bool is_end = done == all;
    if (!is_end && seconds_since(last) < (is_terminal ? 0.2 : 5)) return;
    last = Clock::now();
    std::fprintf(
        stderr, "%s%d of %d ways to split a layer, %d steps timed, best %s tokens/s%s",
        is_terminal ? "\r" : "", done, all, r.num_timed,
        r.best.empty()
            ? "-"
            : with_commas(static_cast<std::int64_t>(r.best[0].tokens_per_second())).c_str(),
        is_terminal && !is_end ? " " : "\n");
  };
}

// The nodes are those of the cluster, unless the user has set others.
Config on_nodes_of(const Cluster& cluster, const Config& config) {
  if (config.parallelism.ranks_per_node != 0) return config;
  return changed(
      config,
      {{"parallelism.ranks_per_node", std::int64_t{cluster.gpus_per_node}, {"the cluster", true}}});
}

void draw(Profiler& profiler, const Asked& a, const StepTime& time) {
  const MeshShape& mesh = time.mesh;
  const int most = 2 * mesh.pp + 1;  // enough to see how it begins, goes on and ends
  const auto s = simulated(profiler, a.cluster, mesh, {time.schedule, time.overlap_experts}, most);
  const auto drawn = std::min<std::int64_t>(time.num_micro_batches, most);
  if (a.picture.empty()) {
    std::printf("\n%lld of %lld micro-batches (--schedule FILE.svg draws every action)\n%s",
                static_cast<long long>(drawn), static_cast<long long>(time.num_micro_batches),
                pipeline::draw_text(s, kMostColumns).c_str());
    return;
  }
  const std::string note =
      formatted("ranks wait %.1f %% of this, %.1f %% of a whole step; activations: at most %s",
                100 * s.bubble_fraction(), 100 * time.waiting,
                size_text(*std::max_element(s.peak.begin(), s.peak.end())).c_str());
  NamedOutput("--schedule", a.picture)
      .write(pipeline::draw_svg(s,
                                detail::concat(time.schedule, ", pp ", mesh.pp, ", ", drawn, " of ",
                                               time.num_micro_batches, " micro-batches"),
                                note));
  std::printf("schedule: %s\n", printable(a.picture).c_str());
}

// --cluster and --search: how long a step would take, and what is the fastest.
int run_estimate_in_time(const Arguments& given) {
  const Asked a = asked_of(given);
  const Config asked = on_nodes_of(a.cluster, load_config(given.rest()));
  std::vector<std::string> chosen;
  const Config config = a.searches ? with_sensible_sizes(asked, a.cluster, chosen) : asked;
  const double limit = a.memory ? static_cast<double>(parse_size(*a.memory)) : a.cluster.memory;
  print_heading(config, a.cluster, !given.has("--cluster"));
  const auto start = std::chrono::steady_clock::now();
  int code = 0;
  naming_sizes(config, [&] {
    if (a.searches) {
      print_sizes(config, chosen);
      const TimeSearch r = search_time(config, a.cluster, limit, kMostListed, show_progress());
      print(r, a, config, limit);
      std::printf("%.1f s\n", seconds_since(start));
      if (a.json) write_json(*a.json, r.best);
      code = r.best.empty() ? 1 : 0;
      if (r.best.empty()) return;
      if (a.draws) {
        Profiler profiler(with_found(config, r.best[0]));
        draw(profiler, a, r.best[0]);
      }
      std::printf("\nto run the first on %s, one process each (docs/multinode.md):\n  %s\n",
                  counted(a.cluster.num_gpus(), "GPU").c_str(),
                  ready_command(given.rest(), chosen, config, r.best[0]).c_str());
      return;
    }
    const MeshShape mesh = mesh_shape(config);
    Profiler profiler(config);
    check_fills(mesh, a.cluster);
    const StepTime t = step_time(profiler, a.cluster, mesh, order_of(config));
    print(t, a.cluster);
    std::printf("%s %s\n", t.peak <= limit ? "fits into" : "does not fit into",
                size_text(limit).c_str());
    std::vector<StepTime> all{t};
    if (a.overlaps) {
      all = ways_to_travel(config, a.cluster);
      print_ways(all);
    }
    if (a.json) write_json(*a.json, all);
    if (a.draws) draw(profiler, a, t);
    code = t.peak <= limit ? 0 : 1;
  });
  return code;
}

using namespace config;
using namespace moesh::estimate;
void print_heading(const Config& c, const Estimate& e) {
  std::printf("%s: %s parameters, %s active, %s on %s\n", model_title(c).c_str(),
              with_commas(e.num_parameters).c_str(), with_commas(e.num_active_parameters).c_str(),
              c.training.dtype.c_str(), c.training.device.c_str());
}

// "0-3", "0-1 14-15": from the first layer to the last one, of each stage.
std::string layers_text(const std::vector<models::LayerRange>& stages) {
  std::string text;
  for (const auto& [begin, end] : stages)
    text += detail::concat(text.empty() ? "" : " ", begin, end - begin > 1 ? "-" : "",
                           end - begin > 1 ? std::to_string(end - 1) : "");
  return text;
}

// "2-14 (2)": of these the third holds the most.
std::string ranks_text(const RankKind& k) {
  std::string text;
  for (size_t i = 0; i < k.ranks.size(); ++i) {
    const size_t first = i;
    while (i + 1 < k.ranks.size() && k.ranks[i + 1] == k.ranks[i] + 1) ++i;
    text += detail::concat(text.empty() ? "" : ",", k.ranks[first]);
    if (i > first) text += "-" + std::to_string(k.ranks[i]);
  }
  return k.ranks.size() == 1 ? text : detail::concat(text, " (", k.most.rank_of_pp, ")");
}

std::string times_text(int num, std::int64_t bytes) {
  return num == 0 ? "-" : detail::concat(num, " x ", size_text(bytes));
}

void print_pipeline(const std::vector<RankKind>& kinds) {
  std::printf("\n%-12s %-14s %17s %11s %11s %11s %11s %11s %15s %15s\n", "ranks of pp", "layers",
              "parameters", "weights", "optimizer", "activations", "peak", "sent", "alive",
              "for weights");
  for (const RankKind& k : kinds) {
    const Estimate& e = k.most;
    std::int64_t activation = 0, kept = 0;
    for (const StageLive& s : e.live.stages)
      activation = std::max(activation, s.activation), kept = std::max(kept, s.kept);
    std::printf("%-12s %-14s %17s %11s %11s %11s %11s %11s %15s %15s\n", ranks_text(k).c_str(),
                layers_text(k.layers).c_str(), with_commas(e.num_stage_parameters).c_str(),
                size_text(e.state.weights).c_str(), size_text(e.state.optimizer).c_str(),
                size_text(e.activations()).c_str(), size_text(e.peak).c_str(),
                size_text(k.sent).c_str(), times_text(e.live.num_alive, activation).c_str(),
                times_text(e.live.num_halves, kept).c_str());
  }
}

void print(const Estimate& e) {
  const int num_ranks = e.mesh.num_ranks();
  const std::string ranks =
      num_ranks == 1 ? "one rank" : detail::concat(num_ranks, " ranks (", e.mesh.describe(), ")");
  std::printf("%s, %s tokens a step\n", ranks.c_str(), with_commas(e.num_tokens).c_str());
  const std::string where = e.mesh.pp == 1 ? "" : detail::concat(": rank ", e.rank_of_pp, " of pp");
  std::printf("\nmemory of a rank (the one that holds the most%s)\n", where.c_str());
  const auto line = [](const char* name, std::int64_t bytes) {
    std::printf("  %-14s %12s\n", name, size_text(bytes).c_str());
  };
  line("weights", e.state.weights);
  line("gradients", e.state.gradients);
  line("optimizer", e.state.optimizer);
  line("activations", e.activations());
  line("peak", e.peak);
  if (e.mesh.pp > 1) print_pipeline(e.kinds);
  std::printf("\nsent by %s in a step\n", e.mesh.pp > 1 ? "rank 0 of pp" : "a rank");
  for (const auto& [key, entry] : e.traffic)
    std::printf("  %-24s %-14s %6lld calls %12s\n", key.first.c_str(), comm::to_string(key.second),
                static_cast<long long>(entry.num_calls), size_text(entry.num_bytes).c_str());
  std::printf("  %-24s %-14s %12s %12s\n", "total", "", "", size_text(e.moved()).c_str());
}

}  // namespace

int run_estimate(const Arguments& given) {
  if (given.has("--cluster") || given.has("--search")) return run_estimate_in_time(given);
  MOESH_CHECK(!given.has("--schedule"), ErrorKind::config,
              "--schedule draws what a cluster does; name one, as in --cluster h100x8:256");
  MOESH_CHECK(!given.has("--overlap"), ErrorKind::config,
              "--overlap compares times on a cluster; name one, as in --cluster h100x8:256");
  const auto json = given.text("--json"), memory = given.text("--memory");
  const std::int64_t limit = memory ? parse_size(*memory) : 0;
  const Config config = load_config(given.rest());
  Estimate e;
  naming_sizes(config, [&] { e = estimate::estimate(config); });
  print_heading(config, e);
  print(e);
  const bool fits = !memory || e.peak <= limit;
  if (memory)
    std::printf("\n%s %s\n", fits ? "fits into" : "does not fit into", size_text(limit).c_str());
  if (json) write_json(*json, formats::JsonList{to_json(e)});
  return fits ? 0 : 1;
}

}  // namespace moesh::cli
