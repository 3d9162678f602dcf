#include "moesh/verify/verify_all.h"

#include <ATen/ATen.h>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/comm/launch.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/checkpointer.h"

namespace moesh::verify {

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
