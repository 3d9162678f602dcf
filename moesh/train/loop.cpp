#include "moesh/train/loop.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/comm/launch.h"
#include "moesh/spmd/spmd.h"
#include "moesh/train/checkpointer.h"
#include "moesh/train/memory.h"
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

// The load of the experts over all MoE layers: how far the busiest is above the mean, and how many
// have nothing to do.
struct Load {
  double max_over_mean = 0;
  std::int64_t num_idle = 0;
};
Load load_of(const std::vector<at::Tensor>& counts) {
  Load load;
  for (const auto& c : counts) {
    const double mean = c.to(at::kDouble).mean().item<double>();
    if (mean > 0) load.max_over_mean = std::max(load.max_over_mean, c.max().item<double>() / mean);
    load.num_idle += c.eq(0).sum().item<std::int64_t>();
  }
  return load;
}

// Console lines and metrics.jsonl; rank 0 alone has one.
class Reporter {
 public:
  // A run that goes on adds its lines to those of the steps that it does not take again.
  Reporter(const Config& config, RunSummary& summary, std::int64_t first_step)
      : config_(config),
        summary_(summary),
        is_terminal_(isatty(STDOUT_FILENO) && comm::num_launched_processes() == 0) {
    if (config.metrics.folder.empty()) return;  // nowhere
    const auto folder = std::filesystem::path(config.metrics.folder);
    std::error_code failed;
    std::filesystem::create_directories(folder, failed);
    const std::string before = kept_lines(folder / "metrics.jsonl", first_step);
    file_.open(folder / "metrics.jsonl", std::ios::trunc);
    file_ << before;
    MOESH_CHECK(file_.good(), ErrorKind::config, "metrics.folder = '", config.metrics.folder,
                "' cannot be written; choose a folder that can");
    summary_.folder = folder.string();
  }

  ~Reporter() {
    if (has_progress_) std::printf("\r\033[K");
  }

  void step(std::int64_t step, const Gradients& g, const Update& u, double lr, double seconds,
            double flops_per_token) {
    const double memory = peak_memory_gib(config_.training.device),
                 tps = static_cast<double>(g.num_tokens) / seconds;
    const double tflops = tps * flops_per_token / 1e12;
    const Load load = load_of(g.counts_E);
    // Losses with all their digits: runs on two meshes are compared by these lines.
    file_ << detail::concat("{\"step\":", step, ",\"loss\":", json(g.loss, 17),
                            ",\"total_loss\":", json(g.total_loss, 17),
                            ",\"grad_norm\":", json(u.grad_norm, 17), ",\"lr\":", json(lr, 9),
                            ",\"seconds\":", json(seconds, 6), ",\"tps\":", json(tps, 6),
                            ",\"tflops\":", json(tflops, 6), ",\"memory_gib\":", json(memory, 4),
                            ",\"expert_max_over_mean\":", json(load.max_over_mean, 6),
                            ",\"experts_idle\":", load.num_idle, ",\"tokens\":", g.num_tokens,
                            ",\"skipped\":", u.skipped ? "true" : "false", "}")
          << std::endl;
    const bool is_logged = step == 1 || step % config_.metrics.log_freq == 0 ||
                           step == config_.training.steps || u.skipped;
    if (is_terminal_ && !is_logged) {
      std::printf("\r\033[K%lld / %lld  loss %.4f", static_cast<long long>(step),
                  static_cast<long long>(config_.training.steps), g.loss);
      std::fflush(stdout);
      has_progress_ = true;
      return;
    }
    if (!is_logged) return;
    if (has_progress_) std::printf("\r\033[K");
    has_progress_ = false;
    std::printf(
        "step: %4lld  loss: %8.5f  grad_norm: %8.4f  memory: %5.2fGiB  tps: %s  tflops: %.3f  experts: max/mean %.2f, %lld idle%s\n",
        static_cast<long long>(step), g.loss, u.grad_norm, memory,
        with_commas(std::llround(tps)).c_str(), tflops, load.max_over_mean,
        static_cast<long long>(load.num_idle),
        u.skipped ? "  (skipped: a gradient is not finite, or no token counts)" : "");
    std::fflush(stdout);
  }

 private:
  static std::string kept_lines(const std::filesystem::path& path, std::int64_t first_step) {
    std::ifstream file(path);
    std::string kept;
    for (std::string line; first_step > 0 && std::getline(file, line);) {
      long long step = 0;
      if (std::sscanf(line.c_str(), "{\"step\":%lld", &step) == 1 && step <= first_step)
        kept += line + "\n";
    }
    return kept;
  }

  // JSON has no infinity and no NaN.
  static std::string json(double x, int digits) {
    if (!std::isfinite(x)) return "null";
    char text[40];
    std::snprintf(text, sizeof text, "%.*g", digits, x);
    return text;
  }

  const Config& config_;
  RunSummary& summary_;
  bool is_terminal_, has_progress_ = false;
  std::ofstream file_;
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
  const auto optimizer = make_optimizer(*model, config.optimizer);
  const StepOptions options = step_options(config);
  Checkpointer checkpointer(config, world, *model, *optimizer);
  Position position = checkpointer.start();
  const std::int64_t first_step = position.step;
  const bool is_first = world.rank() == 0;
  std::optional<Reporter> reporter;
  if (is_first) {
    summary.first_step = first_step;
    reporter.emplace(config, summary, first_step);
    std::printf("%s %s: %s parameters, %s active, on %d ranks (%s)\n", config.model.name.c_str(),
                config.model.size.c_str(), with_commas(model->num_parameters()).c_str(),
                with_commas(model->num_active_parameters()).c_str(), world.size(),
                mesh.shape().describe().c_str());
    std::printf("data: %s\n", dataset.describe().c_str());
    std::fflush(stdout);
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
      reporter->step(step + 1, g, u, lr, took, flops_per_token);
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
