#include <algorithm>
#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/cli/command_line.h"
#include "moesh/cli/commands.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/config/merge.h"
#include "moesh/config/options.h"
#include "moesh/estimate/estimate.h"

namespace moesh::cli {

using namespace config;
using namespace moesh::estimate;
namespace {

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

void write_json(const std::string& path, const Estimate& e) {
  NamedOutput("--json", path)
      .write(
          formats::to_json({formats::JsonObject{{"estimates", {formats::JsonList{to_json(e)}}}}}) +
          "\n");
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
  if (json) write_json(*json, e);
  return fits ? 0 : 1;
}

}  // namespace moesh::cli
