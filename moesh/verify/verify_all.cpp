#include "moesh/verify/verify_all.h"

#include <ATen/ATen.h>

#include <chrono>
#include <cmath>
#include <map>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/this_thread.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/launch.h"
#include "moesh/config/options.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/checkpointer.h"

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
  std::map<std::string, VerifyReference> references;
  for (const Config& config : configs) {
    const auto start = std::chrono::steady_clock::now();
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
    each({config, report, seconds_since(start), found->second, values});
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

using namespace train;
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;

struct GraphRun {
  Named values;
  std::int64_t num_replayed = 0;
};

GraphRun run_of(const Config& config, const data::Dataset& data, const Mesh& mesh,
                std::int64_t num_steps, UseGraph use, const kernels::Graphs& graphs) {
  const auto model = make_model(config);
  load_initial_weights(config, *model);
  const auto optimizer = make_optimizer(*model, config);
  Stepper stepper(*model, *optimizer, step_options(config), use, graphs);
  GraphRun run;
  const auto add = [&](std::string name, const at::Tensor& value) {
    run.values.emplace_back(std::move(name), value.detach().cpu());
  };
  for (std::int64_t i = 0; i < num_steps; ++i) {
    const auto position = i * sample_order(config).num_per_step();
    const auto [g, u] =
        stepper(step_batches(config, data, mesh, position), learning_rates(config)(i));
    const std::string at = "step " + std::to_string(i) + " ";
    add(at + "loss", at::scalar_tensor(g.loss, at::kDouble));
    add(at + "total loss", at::scalar_tensor(g.total_loss, at::kDouble));
    add(at + "gradient norm", at::scalar_tensor(u.grad_norm, at::kDouble));
    for (std::size_t l = 0; l < g.counts_E.size(); ++l)
      add(at + "counts of MoE layer " + std::to_string(l), g.counts_E[l]);
  }
  model->each_param([&](Stored& w, bool) { add(w.spec.name, w.value); });
  for (const auto& s : optimizer->state()) add(s.name, s.value);
  const auto routers = model->routers();
  for (std::size_t i = 0; i < routers.size(); ++i)
    add("expert bias of MoE layer " + std::to_string(i), routers[i]->expert_bias());
  run.num_replayed = stepper.num_replayed();
  return run;
}

std::string first_difference(const Named& with, const Named& without) {
  for (std::size_t i = 0; i < with.size(); ++i) {
    const auto& [name, value] = with[i];
    const at::Tensor& wanted = without[i].second;
    if (value.equal(wanted)) continue;
    const double largest =
        (value.to(at::kDouble) - wanted.to(at::kDouble)).abs().max().item<double>();
    return detail::concat("a CUDA graph of the step gives other bits: ", name, " is off by ",
                          largest, " at most");
  }
  return "";
}

}  // namespace

std::string graph_mismatch(const VerifyCase& c, const kernels::Graphs& graphs) {
  const VerifyCase whole{one_rank(c.config), c.steps, c.ignored};
  const Config& config = whole.config;
  if (use_graph(config) == UseGraph::off || !graphs.refuses(device(config)).empty() ||
      !config.moe.replay.empty())  // the routing of a step is read on the host
    return "";
  const auto data = open_data(whole);
  const std::int64_t num_steps = Stepper::kEagerSteps + std::max<std::int64_t>(2, c.steps);
  std::string found;
  std::exception_ptr fault;
  // On a thread with a stream of its own, which a graph needs; not by `launch`, which has as many
  // ranks as mpirun has processes.
  comm::run_rank_threads(
      {.group = [](int) { return comm::solo_group(); },
       .leave = [&](int, const std::exception_ptr& thrown) { fault = thrown; }},
      [&](comm::Group& world) {
        const Mesh mesh(world, {});
        const MeshScope scope(mesh);
        const auto run = [&](UseGraph use) {
          return run_of(config, *data, mesh, num_steps, use, graphs);
        };
        const GraphRun with = run(use_graph(config)), without = run(UseGraph::off);
        found = first_difference(with.values, without.values);
        if (with.num_replayed > 0 && found.empty())
          log_info("as a CUDA graph the step has the same bits (", with.num_replayed,
                   " steps replayed)");
      },
      launch_options(config));
  if (fault) std::rethrow_exception(fault);
  return found;
}

}  // namespace moesh::verify
