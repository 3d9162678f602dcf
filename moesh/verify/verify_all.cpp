#include "moesh/verify/verify_all.h"

#include <chrono>
#include <cmath>
#include <map>

#include "moesh/base/error.h"
#include "moesh/base/this_thread.h"
#include "moesh/config/options.h"

namespace moesh::verify {

using formats::JsonObject;
using formats::JsonValue;

std::vector<Config> meshes_of(const Config& config, const std::optional<Sweep>& sweep) {
  if (!sweep) return {with_micro_batches(config, "verify's default")};
  const MeshShape given = mesh_shape(config);
  MOESH_CHECK(given.num_ranks() == 1, ErrorKind::config, "--sweep goes through every mesh of ",
              sweep->least_ranks, " to ", sweep->most_ranks,
              " ranks, and a mesh is given, too: ", given.describe(), "; leave one of them out");
  Sweep taken = *sweep;
  taken.with_cp = models::facts(config.model.architecture).takes_cp();
  std::vector<Config> configs;
  for (const auto& mesh : taken.meshes()) configs.push_back(fitted(config, mesh));
  return configs;
}

void verify_all(const std::vector<Config>& configs, int steps, bool keep_values,
                const std::function<void(const Verified&)>& each) {
  using Clock = std::chrono::steady_clock;
  std::map<std::string, VerifyReference> references;
  for (const Config& config : configs) {
    const auto start = Clock::now();
    const VerifyCase c{config, steps};
    const std::string key = numbers_of(one_rank(config));
    auto found = references.find(key);
    if (found == references.end()) {
      found = references.emplace(key, run_reference(c)).first;
      found->second.graph_mismatch = graph_mismatch(c);
    }
    NamedTensors values;
    VerifyReport report = verify_closely(c, found->second, keep_values ? &values : nullptr);
    if (report.error.empty()) report.error = found->second.graph_mismatch;
    interruption_point();  // else its report would have it as an error
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    each({config, report, seconds, found->second, values});
  }
}

bool is_tied(const Config& config) {
  return std::visit([](const auto& m) { return m.tie_embeddings; }, config.model.architecture);
}

JsonValue to_json(const Verified& v) {
  const VerifyReport& r = v.report;
  const MeshShape shape = mesh_shape(v.config);
  JsonObject entry{{"mesh", {shape.describe()}}};
  if (shape.cp > 1) entry.emplace_back("cut", JsonValue{v.config.parallelism.context_parallel_cut});
  if (shape.pp > 1) {
    entry.emplace_back("schedule", JsonValue{v.config.parallelism.pipeline_parallel_schedule});
    entry.emplace_back("tied", JsonValue{is_tied(v.config)});
  }
  entry.insert(
      entry.end(),
      {
          {"holds", {r.holds()}},
          {"worst", std::isfinite(r.worst_ratio) ? JsonValue{r.worst_ratio} : JsonValue{nullptr}},
          {"worst_tensor", {r.worst_tensor}},
          {"first", {r.mismatches.empty() ? std::string() : r.mismatches[0].tensor}},
          {"error", {r.error}},
          {"left_out",
           {JsonObject{{"steps", {r.left_out.steps}},
                       {"tensors", {r.left_out.tensors}},
                       {"gradients", {r.left_out.gradients}},
                       {"against_float64", {r.left_out.against_float64}}}}},
          {"cut_alike", {why_cut_alike(v.config)}},
      });
  return {entry};
}

}  // namespace moesh::verify
