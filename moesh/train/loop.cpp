#include "moesh/train/loop.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>

#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/comm/launch.h"
#include "moesh/spmd/spmd.h"
#include "moesh/train/checkpointer.h"
#include "moesh/train/memory.h"
#include "moesh/train/metrics/sink.h"
#include "moesh/train/step.h"

namespace moesh::train {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> stop_signal{0};

// Ends the run after the current step; a second signal ends the process as usual.
class SignalScope {
 public:
  SignalScope() {
    stop_signal = 0;
    for (int s : {SIGINT, SIGTERM})
      std::signal(s, [](int signal) {
        stop_signal = signal;
        std::signal(signal, SIG_DFL);
      });
  }
  ~SignalScope() {
    for (int s : {SIGINT, SIGTERM}) std::signal(s, SIG_DFL);
  }
};

// Whether any rank was told to stop, or its time is over: all ranks agree, so that none waits for
// another.
bool stop_agreed(comm::Group& world, const Config& config, Clock::time_point start) {
  const double minutes = std::chrono::duration<double>(Clock::now() - start).count() / 60;
  const bool is_over = config.training.max_minutes > 0 && minutes >= config.training.max_minutes;
  const at::Tensor mine =
      at::full({1}, is_over || stop_signal != 0, at::TensorOptions(device(config)).dtype(at::kInt));
  return world.all_reduce(mine, comm::ReduceOp::max).item<int>() != 0;
}

void run_rank(comm::Group& world, const Config& config, const data::Dataset& dataset,
              Clock::time_point start, RunSummary& summary) {
  const Mesh mesh(world, mesh_shape(config));
  const MeshScope scope(mesh);
  const auto model = make_model(config);
  const auto optimizer = make_optimizer(*model, config);
  const StepOptions options = step_options(config);
  Checkpointer checkpointer(config, world, *model, *optimizer);
  Position position = checkpointer.start();
  const std::int64_t first_step = position.step;
  const bool is_first = world.rank() == 0;
  MetricSinks sinks;
  if (is_first) {
    sinks = open_sinks(config, first_step);
    summary.first_step = first_step;
    summary.folder = config.metrics.folder;
    std::printf("%s %s: %s parameters, %s active, on %d ranks (%s)\n", config.model.name.c_str(),
                config.model.size.c_str(), with_commas(model->num_parameters()).c_str(),
                with_commas(model->num_active_parameters()).c_str(), world.size(),
                mesh.shape().describe().c_str());
    std::printf("data: %s\n", dataset.describe().c_str());
    std::fflush(stdout);
    if (dispatcher(config) == nn::Dispatcher::automatic && mesh.size(ep) * mesh.size(etp) > 1)
      log_info("dispatcher auto: ",
               nn::describe_choice(nn::exchange_of(device(config)), mesh.shape(),
                                   models::facts(config.model.architecture).top_k));
  }
  const double flops_per_token = model->flops_per_token(config.data.sequence_length);
  std::vector<double> seconds;
  auto last = start;
  for (std::int64_t step = first_step; step < config.training.steps; ++step) {
    const Gradients g = accumulate_gradients(
        *model, step_batches(config, dataset, mesh, position.data_position), options);
    const double lr = learning_rate(config, step);
    const Update u = apply_gradients(*model, *optimizer, g, lr, options);
    position = {.step = step + 1,
                .data_position = position.data_position + sample_order(config).num_per_step()};
    const bool stop = stop_agreed(world, config, start);
    const auto now = Clock::now();
    const double took = std::chrono::duration<double>(now - last).count();
    last = now;
    if (is_first) {
      const StepRecord record{.step = step + 1,
                              .seconds = took,
                              .loss = g.loss,
                              .total_loss = g.total_loss,
                              .grad_norm = u.grad_norm,
                              .lr = lr,
                              .num_tokens = g.num_tokens,
                              .flops_per_token = flops_per_token,
                              .memory_gib = peak_memory_gib(config.training.device),
                              .experts = expert_load(g.counts_E),
                              .skipped = u.skipped};
      for (const auto& sink : sinks) sink->write(record);
      summary.losses.push_back(g.loss);
      ++summary.num_steps;
      if (step == first_step)
        summary.first_step_seconds = took;
      else
        seconds.push_back(took);
      summary.interrupted = stop;
    }
    if (stop) break;
    checkpointer.after_step(position);
  }
  for (const auto& sink : sinks) sink->finish();
  checkpointer.finish(position);
  if (is_first && !seconds.empty()) {
    std::nth_element(seconds.begin(),
                     seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2),
                     seconds.end());
    summary.step_seconds = seconds[seconds.size() / 2];
  }
}

}  // namespace

RunSummary train(const Config& config) {
  const auto start = Clock::now();
  RunSummary summary;
  const auto dataset = open_dataset(config);
  summary.entropy = dataset->entropy();
  const SignalScope signals;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) { run_rank(world, config, *dataset, start, summary); },
      launch_options(config));
  return summary;
}

}  // namespace moesh::train
