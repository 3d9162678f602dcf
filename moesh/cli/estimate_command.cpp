#include <chrono>
#include <cstdio>
#include <fstream>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/cli/commands.h"
#include "moesh/cli/estimate_in_time.h"
#include "moesh/cli/memory_errors.h"
#include "moesh/cli/sizes.h"
#include "moesh/config/merge.h"
#include "moesh/estimate/estimate.h"

namespace moesh::cli {

using namespace config;
using namespace moesh::estimate;
namespace {

constexpr size_t kMostListed = 20;

void print_heading(const Config& c, const Estimate& e) {
  std::printf("%s %s: %s parameters, %s active, %s on %s\n", c.model.name.c_str(),
              c.model.size.c_str(), with_commas(e.num_parameters).c_str(),
              with_commas(e.num_active_parameters).c_str(), c.training.dtype.c_str(),
              c.training.device.c_str());
}

void print(const Estimate& e) {
  const int num_ranks = e.mesh.num_ranks();
  const std::string ranks =
      num_ranks == 1 ? "one rank" : detail::concat(num_ranks, " ranks (", e.mesh.describe(), ")");
  std::printf("%s, %s tokens a step\n", ranks.c_str(), with_commas(e.num_tokens).c_str());
  std::printf("\nmemory of a rank (the one that holds the most)\n");
  const auto line = [](const char* name, std::int64_t bytes) {
    std::printf("  %-14s %12s\n", name, size_text(bytes).c_str());
  };
  line("weights", e.state.weights);
  line("gradients", e.state.gradients);
  line("optimizer", e.state.optimizer);
  line("activations", e.activations());
  line("peak", e.peak);
  std::printf("\nsent by a rank in a step\n");
  for (const auto& [key, entry] : e.traffic)
    std::printf("  %-24s %-14s %6lld calls %12s\n", key.first.c_str(), comm::to_string(key.second),
                static_cast<long long>(entry.num_calls), size_text(entry.num_bytes).c_str());
  std::printf("  %-24s %-14s %12s %12s\n", "total", "", "", size_text(e.moved()).c_str());
}

void print(const SearchResult& r, int num_ranks, std::int64_t limit) {
  if (r.best.empty()) {
    std::printf(
        "%d ranks: %d meshes, %d tried, and none fits into %s a rank; try more ranks, a smaller "
        "batch, or --activation_checkpoint.mode=full\n",
        num_ranks, r.num_meshes, r.num_tried, size_text(limit).c_str());
    return;
  }
  std::printf("%d ranks: %d meshes, %d tried, the best %zu that fit into %s a rank\n", num_ranks,
              r.num_meshes, r.num_tried, r.best.size(), size_text(limit).c_str());
  std::printf("\n%12s %12s %14s %16s  mesh\n", "memory", "sent/step", "tokens/step",
              "all ranks/token");
  for (const Estimate& e : r.best)
    std::printf("%12s %12s %14s %16s  %s\n", size_text(e.peak).c_str(),
                size_text(e.moved()).c_str(), with_commas(e.num_tokens).c_str(),
                size_text(e.moved_per_token()).c_str(), e.mesh.describe().c_str());
}

void write_json(const std::string& path, const std::vector<Estimate>& all) {
  formats::JsonList estimates;
  for (const Estimate& e : all) estimates.push_back(to_json(e));
  std::ofstream file(path);
  file << formats::to_json({formats::JsonObject{{"estimates", {std::move(estimates)}}}}) << "\n";
  MOESH_CHECK(file.good(), ErrorKind::config, "--json ", path,
              " cannot be written; choose a file that can");
}

}  // namespace

int run_estimate(const Given& given) {
  if (const auto cluster = given.text("--cluster")) return run_estimate_in_time(*cluster, given);
  MOESH_CHECK(!given.has("--schedule"), ErrorKind::config,
              "--schedule draws what a cluster does; name one, as in --cluster h100x8:256");
  const auto json = given.text("--json"), memory = given.text("--memory");
  const std::int64_t limit = memory ? parse_size(*memory) : 0;
  const int num_ranks = given.number("--search", 0);
  const Config config = load_config(given.rest());
  if (num_ranks == 0) {
    Estimate e;
    naming_sizes(config, [&] { e = estimate::estimate(config); });
    print_heading(config, e);
    print(e);
    const bool fits = !memory || e.peak <= limit;
    if (memory)
      std::printf("\n%s %s\n", fits ? "fits into" : "does not fit into", size_text(limit).c_str());
    if (json) write_json(*json, {e});
    return fits ? 0 : 1;
  }
  MOESH_CHECK(memory, ErrorKind::config, "--search ", num_ranks,
              " needs the memory of a rank, as in --memory 80GiB");
  const auto start = std::chrono::steady_clock::now();
  const SearchResult r = search(config, num_ranks, limit, kMostListed);
  if (!r.best.empty()) print_heading(config, r.best[0]);
  print(r, num_ranks, limit);
  std::printf("\n%.1f s\n",
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (json) write_json(*json, r.best);
  return r.best.empty() ? 1 : 0;
}

}  // namespace moesh::cli
