// What metrics cost: steps with and without them, in turn.
//   bench_metrics [--pairs N] [--steps N] OPTIONS OF moesh train
// One of a pair is N steps alone, the other N steps with what the train loop does for metrics: the
// clock of the sections, the bytes that are sent, the record, and the sinks (JSONL, CSV and
// TensorBoard). Which of them is first alternates. Printed are the medians of all steps of each
// kind, the median of the differences of the pairs with its quartiles, and the time of the record
// and the sinks by themselves.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/base/sections.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/sent.h"
#include "moesh/config/merge.h"
#include "moesh/spmd/spmd.h"
#include "moesh/train/build.h"
#include "moesh/train/memory.h"
#include "moesh/train/metrics/sink.h"
#include "moesh/train/step.h"

namespace moesh {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int num_pairs = 20, num_steps = 5;
  std::vector<std::string> rest{"--model=deepseek_v3:debug"};
};

Options read_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool is_pairs = name == "--pairs", is_steps = name == "--steps";
    if (is_pairs || is_steps) {
      MOESH_CHECK(i + 1 < argc, ErrorKind::config, name, " takes a value");
      (is_pairs ? o.num_pairs : o.num_steps) = std::stoi(argv[++i]);
    } else {
      o.rest.push_back(name);
    }
  }
  MOESH_CHECK(o.num_pairs >= 2 && o.num_steps >= 1, ErrorKind::config, "--pairs ", o.num_pairs,
              ", --steps ", o.num_steps, "; the first takes 2 or more, the second 1 or more");
  return o;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(q * static_cast<double>(values.size() - 1))];
}

/// Rank 0's steps, with and without metrics.
class Trial {
 public:
  Trial(const config::Config& config, comm::Group& world)
      : config_(config),
        mesh_(world, mesh_shape(config)),
        scope_(mesh_),
        dataset_(train::open_dataset(config)),
        model_(train::make_model(config)),
        optimizer_(train::make_optimizer(*model_, config)) {
    if (world.rank() == 0) sinks_ = train::open_sinks(config, {});
  }

  /// Seconds of a step, the mean of `num_steps`.
  double run(int num_steps, bool with_metrics) {
    const bool measures = with_metrics && mesh_.rank() == 0;
    std::optional<SectionClock> clock;
    std::optional<comm::SentBytes> sent;
    if (measures) clock.emplace(), sent.emplace();
    const auto begin = Clock::now();
    for (int i = 0; i < num_steps; ++i) {
      auto batches = train::step_batches(config_, *dataset_, mesh_, 0);
      const auto result = train::take_step(*model_, *optimizer_, std::move(batches), 1e-4,
                                           train::step_options(config_));
      if (measures) record(result, clock->take(), sent->take());
    }
    return seconds_since(begin) / num_steps;
  }
  const std::vector<double>& record_seconds() const { return record_seconds_; }

 private:
  void record(const train::StepResult& result, const SectionTimes& sections,
              std::map<std::string, std::int64_t> sent) {
    const auto begin = Clock::now();
    const auto& [g, u] = result;
    const train::StepRecord r{.step = ++step_,
                              .time = 1.7e9,
                              .seconds = sections.of_step(),
                              .loss = g.loss,
                              .total_loss = g.total_loss,
                              .auxiliary = g.auxiliary,
                              .grad_norm = u.grad_norm,
                              .num_tokens = g.num_tokens,
                              .memory_gib = train::peak_memory_gib(config_.training.device),
                              .sections = sections,
                              .sent = std::move(sent),
                              .experts = train::expert_load(g.counts_E),
                              .bias = u.bias,
                              .counts_E = g.counts_E};
    for (const auto& sink : sinks_) sink->write(r);
    record_seconds_.push_back(seconds_since(begin));
  }

  config::Config config_;
  Mesh mesh_;
  MeshScope scope_;
  std::unique_ptr<data::Dataset> dataset_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  train::MetricSinks sinks_;
  std::int64_t step_ = 0;
  std::vector<double> record_seconds_;
};

void run(const Options& options, const std::filesystem::path& folder) {
  auto args = options.rest;
  args.insert(args.end(), {"--metrics.folder=" + folder.string(), "--metrics.enable_csv",
                           "--metrics.enable_tensorboard", "--quiet"});
  const config::Config config = config::load_config(args);
  std::vector<double> with, without, difference, records;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        Trial trial(config, world);
        trial.run(2, true);  // makes what is made once
        for (int pair = 0; pair < options.num_pairs; ++pair) {
          double seconds[2];
          for (const bool metrics : {pair % 2 == 0, pair % 2 != 0})
            seconds[metrics] = trial.run(options.num_steps, metrics);
          if (world.rank() != 0) continue;
          without.push_back(seconds[0]), with.push_back(seconds[1]);
          difference.push_back(100 * (seconds[1] / seconds[0] - 1));
        }
        if (world.rank() == 0) records = trial.record_seconds();
      },
      launch_options(config));
  const double alone = quantile(without, 0.5), of_record = quantile(records, 0.5);
  std::printf("a step alone %.3f ms, with metrics %.3f ms\n", 1e3 * alone,
              1e3 * quantile(with, 0.5));
  std::printf("difference of %d pairs: median %.2f %%, quartiles %.2f and %.2f %%\n",
              options.num_pairs, quantile(difference, 0.5), quantile(difference, 0.25),
              quantile(difference, 0.75));
  std::printf("record and sinks %.3f ms, %.2f %% of a step\n", 1e3 * of_record,
              100 * of_record / alone);
}

}  // namespace
}  // namespace moesh

int main(int argc, char** argv) {
  const auto folder = std::filesystem::temp_directory_path() / "moesh_bench_metrics";
  int code = 0;
  try {
    moesh::run(moesh::read_options(argc, argv), folder);
  } catch (const moesh::Error& e) {
    std::fprintf(stderr, "bench_metrics: %s\n", e.what());
    code = 2;
  }
  std::filesystem::remove_all(folder);
  return code;
}
