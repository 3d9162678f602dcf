// What metrics cost: steps with and without them, in turn.
//   bench_metrics [--pairs N] [--steps N] [--records N] OPTIONS OF moesh train
// One of a pair is N plain steps, the other N steps with what the train loop does for metrics: the
// clock of the sections, the bytes that are sent, the record, and the sinks (JSONL, CSV and
// TensorBoard). Which of them is first alternates. Times are those of the cores (pairs.h). With
// --records the record and the sinks are had so many times in each step, and a difference is shown
// for one of them: what is small beside the noise of a step can be seen so.

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "bench/train/pairs.h"
#include "moesh/base/error.h"
#include "moesh/base/timeline.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"
#include "moesh/config/merge.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/train/build.h"
#include "moesh/train/metrics/record.h"
#include "moesh/train/metrics/sink.h"
#include "moesh/train/step.h"
#include "tests/train/take_step.h"

namespace moesh {
namespace {

struct Options {
  int num_pairs = 20, num_steps = 1, num_records = 1;
  std::vector<std::string> rest{"--model=deepseek_v3:debug"};
};

Options read_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool is_pairs = name == "--pairs", is_steps = name == "--steps";
    if (is_pairs || is_steps || name == "--records") {
      MOESH_CHECK(i + 1 < argc, ErrorKind::config, name, " takes a value");
      (is_pairs ? o.num_pairs : is_steps ? o.num_steps : o.num_records) = std::stoi(argv[++i]);
    } else {
      o.rest.push_back(name);
    }
  }
  MOESH_CHECK(o.num_pairs >= 6 && o.num_steps >= 1 && o.num_records >= 1, ErrorKind::config,
              "--pairs ", o.num_pairs, ", --steps ", o.num_steps, ", --records ", o.num_records,
              "; the first takes 6 or more, which an interval needs, the others 1 or more");
  return o;
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
  double run(int num_steps, int num_records) {
    const bool measures = num_records > 0 && mesh_.rank() == 0;
    std::optional<SectionClock> clock;
    std::optional<comm::SentBytes> sent;
    if (measures) clock.emplace(), sent.emplace();
    const double begin = cpu_seconds();
    for (int i = 0; i < num_steps; ++i) {
      auto batches = train::step_batches(config_, *dataset_, mesh_, 0);
      const auto result = train::take_step(*model_, *optimizer_, std::move(batches), 1e-4,
                                           train::step_options(config_));
      if (!measures) continue;
      const SectionTimes sections = clock->take();
      const auto bytes = sent->take();
      for (int k = 0; k < num_records; ++k) record(result, sections, bytes);
    }
    return (cpu_seconds() - begin) / num_steps;
  }

 private:
  void record(const train::StepResult& result, const SectionTimes& sections,
              const std::map<std::string, std::int64_t>& sent) {
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
                              .sent = sent,
                              .experts = train::expert_load(g.counts_E),
                              .bias = u.bias,
                              .counts_E = g.counts_E};
    for (const auto& sink : sinks_) sink->write(r);
  }

  config::Config config_;
  Mesh mesh_;
  MeshScope scope_;
  std::unique_ptr<data::Dataset> dataset_;
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  train::MetricSinks sinks_;
  std::int64_t step_ = 0;
};

void run(const Options& options, const std::filesystem::path& folder) {
  auto args = options.rest;
  args.insert(args.end(), {"--metrics.folder=" + folder.string(), "--metrics.enable_csv",
                           "--metrics.enable_tensorboard", "--quiet"});
  const config::Config config = config::load_config(args);
  std::vector<double> without, of_one;
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        Trial trial(config, world);
        trial.run(2, 1);  // makes what is made once
        for (int pair = 0; pair < options.num_pairs; ++pair) {
          double seconds[2];
          for (const bool metrics : {pair % 2 == 0, pair % 2 != 0})
            seconds[metrics] = trial.run(options.num_steps, metrics ? options.num_records : 0);
          if (world.rank() != 0) continue;
          without.push_back(seconds[0]);
          of_one.push_back((seconds[1] - seconds[0]) / options.num_records);
        }
      },
      launch_options(config));
  const double alone = median_of(without).value;
  const Median cost = median_of(of_one);
  std::printf("a plain step: %.3f ms of the cores; metrics, by %d pairs with %d records a step:\n",
              1e3 * alone, options.num_pairs, options.num_records);
  std::printf("  %.4f ms (%.4f to %.4f), %.3f %% of a step (%.3f to %.3f %%)\n", 1e3 * cost.value,
              1e3 * cost.low, 1e3 * cost.high, 100 * cost.value / alone, 100 * cost.low / alone,
              100 * cost.high / alone);
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
