// Where the time of a training step goes, by section of the model and by kernel.
//   bench_step [--warmup N] [--profile N] [--trace FILE] [--memory] [--routing HOW] OPTIONS OF
//   moesh train
// Runs N steps without a profiler (the median is what a step takes), then N with LibTorch's, and
// prints the time of the device by kernel and by section (what the host was in when it launched a
// kernel: a forward section, or a node of backward); on the CPU, that of LibTorch's operations,
// without what they call. Where steps are CUDA graphs, the host launches nothing, and the sections
// are those of further steps without a graph, as are the FLOPs and TFLOP/s of matrix products: as
// many as LibTorch counts for the operation that launched a kernel. One rank. --memory: where in a
// step the most memory is in use, on the device and in the dry run of `moesh estimate`. --routing:
// which experts tokens go to, whatever the router says; bench/routing.h has the ways.

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bench/routing.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/estimate/estimate.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/train/build.h"
#include "moesh/train/metrics/record.h"
#include "moesh/train/step.h"

namespace moesh {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

struct Options {
  int num_warm = 10, num_profiled = 5;
  bool memory = false;
  std::string trace, routing = "model";
  std::vector<std::string> rest;
};

Options read_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] {
      MOESH_CHECK(i + 1 < argc, ErrorKind::config, name, " takes a value");
      return std::string(argv[++i]);
    };
    if (name == "--warmup")
      o.num_warm = std::stoi(value());
    else if (name == "--profile")
      o.num_profiled = std::stoi(value());
    else if (name == "--trace")
      o.trace = value();
    else if (name == "--routing")
      o.routing = value();
    else if (name == "--memory")
      o.memory = true;
    else
      o.rest.push_back(name);
  }
  MOESH_CHECK(o.num_warm >= 2 && o.num_profiled >= 1, ErrorKind::config, "--warmup ", o.num_warm,
              ", --profile ", o.num_profiled, "; the first takes 2 or more, the second 1 or more");
  return o;
}

// A range of the host in which kernels were launched.
struct Range {
  std::uint64_t begin, end;
  std::string name;
};

const std::string kNode = "autograd::engine::evaluate_function: ";

// A node of backward, or a part of the step that is called there.
bool is_section(const kineto::KinetoEvent& e) {
  return e.name().starts_with(kNode) ||
         e.scope() == static_cast<uint8_t>(at::RecordScope::USER_SCOPE);
}

/// The time of each name, how often, and the FLOPs that are known.
class Table {
 public:
  void add(const std::string& name, double ms, double flops = 0) {
    Row& row = rows_[name];
    row.ms += ms, ++row.calls, row.flops += flops;
  }
  void print(const char* title, int num_steps) const {
    std::vector<std::pair<std::string, Row>> rows(rows_.begin(), rows_.end());
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
    Row all;
    for (const auto& [name, row] : rows)
      all.ms += row.ms, all.calls += row.calls, all.flops += row.flops;
    std::printf("\n%-9s %-7s %-8s %-8s %-8s %s\n", "ms", "share", "calls", "GFLOP", "TFLOP/s",
                title);
    const auto print_row = [&](const std::string& name, const Row& row) {
      std::printf("%-9.3f %-7.3f %-8.1f ", row.ms / num_steps, row.ms / all.ms,
                  static_cast<double>(row.calls) / num_steps);
      if (row.flops > 0)
        std::printf("%-8.0f %-8.0f ", row.flops * 1e-9 / num_steps, row.flops / row.ms * 1e-9);
      else
        std::printf("%-8s %-8s ", "", "");
      std::printf("%.140s\n", name.c_str());
    };
    for (const auto& [name, row] : rows)
      if (row.ms >= all.ms * 5e-4) print_row(name, row);
    print_row("all", {all.ms, all.calls});
  }

 private:
  struct Row {
    double ms = 0;
    int calls = 0;
    double flops = 0;
  };
  std::map<std::string, Row> rows_;
};

// As libkineto numbers them.
bool is_kernel(const kineto::KinetoEvent& e) {  // or a copy, or a fill
  return e.activityType() >= 3 && e.activityType() <= 5;
}
bool is_launch(const kineto::KinetoEvent& e) {  // a call of CUDA's runtime or driver
  return e.activityType() == 7 || e.activityType() == 8;
}

// The innermost section that holds a time of the host. They nest, and come in the order of their
// beginnings.
std::string section_at(const std::vector<Range>& ranges, std::uint64_t time) {
  auto it = std::upper_bound(ranges.begin(), ranges.end(), time,
                             [](std::uint64_t t, const Range& r) { return t < r.begin; });
  while (it != ranges.begin()) {
    --it;
    if (time < it->end) return it->name;
  }
  return "outside of any section";
}

double milliseconds(const kineto::KinetoEvent& e) {
  return static_cast<double>(e.durationNs()) * 1e-6;
}

void print_kernels(const std::vector<kineto::KinetoEvent>& events, int num_steps) {
  std::unordered_map<std::uint64_t, double>
      flops;  // of an operation, until a kernel of it has them
  for (const auto& e : events)
    if (e.deviceType() == at::kCPU && e.flops() > 0)
      flops[e.correlationId()] = static_cast<double>(e.flops());
  Table kernels;
  for (const auto& e : events) {
    if (!is_kernel(e)) continue;
    const auto found = flops.find(e.linkedCorrelationId());
    kernels.add(e.name(), milliseconds(e),
                found == flops.end() ? 0 : std::exchange(found->second, 0));
  }
  kernels.print("kernel", num_steps);
}

void print_sections(const std::vector<kineto::KinetoEvent>& events, int num_steps) {
  std::vector<Range> ranges;
  std::unordered_map<std::uint64_t, std::uint64_t> launched_at;  // by correlation
  for (const auto& e : events) {
    if (is_launch(e)) launched_at[e.correlationId()] = e.startNs();
    if (e.deviceType() == at::kCPU && is_section(e))
      ranges.push_back(
          {e.startNs(), e.endNs(),
           e.name().starts_with(kNode) ? "backward: " + e.name().substr(kNode.size()) : e.name()});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  Table sections;
  for (const auto& e : events) {
    if (!is_kernel(e)) continue;
    const auto found = launched_at.find(e.correlationId());
    sections.add(found == launched_at.end() ? "unknown" : section_at(ranges, found->second),
                 milliseconds(e));
  }
  sections.print("section", num_steps);
}

// Each operation without those that it calls.
void print_host_table(const std::vector<kineto::KinetoEvent>& events, int num_steps) {
  struct Open {
    std::uint64_t end;
    std::string name;
  };
  std::map<std::uint64_t, std::vector<const kineto::KinetoEvent*>> threads;
  for (const auto& e : events)
    if (e.deviceType() == at::kCPU) threads[e.startThreadId()].push_back(&e);
  Table table;
  for (auto& [thread, list] : threads) {
    std::stable_sort(list.begin(), list.end(), [](const auto* a, const auto* b) {
      return a->startNs() != b->startNs() ? a->startNs() < b->startNs() : a->endNs() > b->endNs();
    });
    std::vector<Open> open;
    for (const auto* e : list) {
      while (!open.empty() && open.back().end <= e->startNs()) open.pop_back();
      const double ms = milliseconds(*e);
      table.add(e->name(), ms);
      if (!open.empty()) table.add(open.back().name, -ms);
      open.push_back({e->endNs(), e->name()});
    }
  }
  table.print("operation (calls: and what it calls)", num_steps);
}

torch::profiler::impl::ProfilerConfig profiler_config() {
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO,
                                               /*report_input_shapes=*/true,
                                               /*profile_memory=*/false, /*with_stack=*/false,
                                               /*with_flops=*/true);
}

// Now, as Kineto has the times of events.
std::uint64_t now() {
  const auto time = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

std::vector<kineto::KinetoEvent> between(const std::vector<kineto::KinetoEvent>& events,
                                         std::uint64_t begin, std::uint64_t end) {
  std::vector<kineto::KinetoEvent> some;
  for (const auto& e : events)
    if (e.startNs() >= begin && e.startNs() < end) some.push_back(e);
  return some;
}

std::set<ActivityType> activities(const config::Config& config) {
  if (config.training.device == "cpu") return {ActivityType::CPU};
  return {ActivityType::CPU, ActivityType::CUDA};
}

// Where the peak of a step is: in which operation, and in which ones that called it.
class Peak {
 public:
  static inline std::function<double()> gib;  // the most so far
  static void reset() { most_ = gib(), where_ = "", open_.clear(); }
  static void print(const char* of) {
    std::printf("%s: %.3f GiB, in %s\n", of, most_, where_.c_str());
  }
  // The operations of this thread, as long as the handle is not removed.
  static at::CallbackHandle watch() {
    return at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
              look();
              open_.emplace_back(f.name());
              return nullptr;
            },
            [](const at::RecordFunction&, at::ObserverContext*) {
              look();
              if (!open_.empty()) open_.pop_back();
            })
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE,
                     at::RecordScope::BACKWARD_FUNCTION}));
  }

 private:
  static void look() {
    if (gib() <= most_) return;
    most_ = gib(), where_ = "";
    for (const auto& name : open_) where_ += (where_.empty() ? "" : " > ") + name;
  }
  static inline double most_ = 0;
  static inline std::string where_;
  static inline std::vector<std::string> open_;
};

void print_peaks(const config::Config& config, const std::function<void()>& take_step) {
  const auto handle = Peak::watch();
  Peak::gib = [&] { return train::peak_memory_gib(config.training.device); };
  train::reset_peak_memory(config.training.device);
  Peak::reset();
  take_step();
  Peak::print("measured");
  Peak::gib = [] { return static_cast<double>(kernels::meta::DryRun::peak()) / 0x1p30; };
  Peak::reset();
  estimate::estimate(config);
  Peak::print("estimated");
  at::removeCallback(handle);
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void run(comm::Group& world, const config::Config& config, const Options& o) {
  const auto begin = Clock::now();
  const Mesh mesh(world, config::mesh_shape(config));
  const MeshScope scope(mesh);
  const auto dataset = train::open_dataset(config);
  const auto model = train::make_model(config);
  const auto optimizer = train::make_optimizer(*model, config);
  train::StepOptions options = train::step_options(config);
  std::optional<bench::GivenRouting> routing;
  if (o.routing != "model") {
    options.forward.probe = &routing.emplace(o.routing);
    options.probe_waits = false;
  }
  train::Stepper stepper(*model, *optimizer, options, train::use_graph(config)),
      without_graph(*model, *optimizer, options, train::UseGraph::off);
  std::printf("data, model and optimizer made in %.3f s, ", seconds_since(begin));
  std::int64_t step = 0;
  double load = 0;  // of the busiest expert, over the mean
  const auto step_by = [&](train::Stepper& take) {
    auto batches = train::step_batches(config, *dataset, mesh,
                                       step * config::sample_order(config).num_per_step());
    const auto result = take(std::move(batches), train::learning_rates(config)(step++));
    load = 0;
    for (const at::Tensor& counts : result.gradients.counts_E)
      load = std::max(load,
                      counts.max().item<double>() / counts.to(at::kDouble).mean().item<double>());
  };
  const auto take_step = [&] { step_by(stepper); };
  std::vector<double> seconds;
  for (int i = 0; i < o.num_warm; ++i) {
    const auto start = Clock::now();
    take_step();
    seconds.push_back(seconds_since(start));
  }
  std::printf("first step %.3f s, ", seconds[0]);
  std::sort(seconds.begin() + 1, seconds.end());
  const auto count = seconds.size() - 1;
  std::printf("then median %.4f s, quartiles %.4f and %.4f s of %zu; %.2f GiB\n",
              seconds[1 + count / 2], seconds[1 + count / 4], seconds[1 + count * 3 / 4], count,
              train::peak_memory_gib(config.training.device));
  std::printf("routing %s: the busiest expert has %.2f times the mean; %ld steps were graphs\n",
              o.routing.c_str(), load, stepper.num_replayed());
  if (o.memory) print_peaks(config, take_step);
  const bool on_device = config.training.device != "cpu";
  // One session: the profiler of a process begins once.
  kineto::enableProfiler(
      profiler_config(), activities(config),
      {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE, at::RecordScope::BACKWARD_FUNCTION});
  const auto steps = [&](train::Stepper& take) {
    const std::uint64_t first = now();
    for (int i = 0; i < o.num_profiled; ++i) step_by(take);
    return std::pair(first, now());
  };
  const auto [begin_first, end_first] = steps(stepper);
  auto [begin_second, end_second] = std::pair(begin_first, end_first);
  if (stepper.num_replayed() > 0) {
    stepper.release();
    step_by(without_graph);  // makes what the graphs had
    std::tie(begin_second, end_second) = steps(without_graph);
  }
  const auto result = kineto::disableProfiler();
  if (!o.trace.empty()) result->save(o.trace);
  const auto first = between(result->events(), begin_first, end_first);
  if (!on_device) return print_host_table(first, o.num_profiled);
  print_kernels(first, o.num_profiled);
  const auto second = between(result->events(), begin_second, end_second);
  if (stepper.num_replayed() > 0) print_kernels(second, o.num_profiled);
  print_sections(second, o.num_profiled);
}

int main(int argc, char** argv) try {
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // lines are there, whatever comes
  const Options o = read_options(argc, argv);
  const config::Config config = config::load_config(o.rest);
  MOESH_CHECK(config::mesh_shape(config).num_ranks() == 1, ErrorKind::config,
              "the profile is of one rank, and the mesh has ",
              config::mesh_shape(config).num_ranks());
  // Here, and not in the thread of the rank: the profiler begins in the thread that loaded it.
  kineto::prepareProfiler(profiler_config(), activities(config));
  comm::launch(
      1, [&](comm::Group& world) { run(world, config, o); }, config::launch_options(config));
  return 0;
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}

}  // namespace
}  // namespace moesh

int main(int argc, char** argv) { return moesh::main(argc, argv); }
