// Where the time of a training step goes, by section of the model and by kernel.
//   bench_step [--warmup N] [--profile N] [--trace FILE] [--memory] [--routing HOW] OPTIONS OF
//   moesh train
// Runs N steps without a profiler (the median is what a step takes), then N with LibTorch's, and
// prints the time of the device by kernel and by section (what the host was in when it launched a
// kernel: a forward section, or a node of backward); on the CPU, that of LibTorch's operations,
// without what they call. Where steps are CUDA graphs, the host launches nothing, and the sections
// are those of further steps without a graph. One rank. --memory: where in a step the most memory
// is in use, on the device and in the dry run of `moesh estimate`. --routing: which experts tokens
// go to, whatever the router says; bench/routing.h has the ways.

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
#include <unordered_map>
#include <vector>

#include "bench/routing.h"
#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/config/merge.h"
#include "moesh/estimate/estimate.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/kernels/meta/dry_run.h"
#include "moesh/train/build.h"
#include "moesh/train/memory.h"
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

/// The time of each name, and how often.
class Table {
 public:
  void add(const std::string& name, double ms) { rows_[name].first += ms, ++rows_[name].second; }
  void print(const char* title, int num_steps) const {
    std::vector<std::pair<std::string, std::pair<double, int>>> rows(rows_.begin(), rows_.end());
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.second.first > b.second.first; });
    double sum = 0;
    for (const auto& row : rows) sum += row.second.first;
    std::printf("\n%-9s %-7s %-7s %s\n", "ms", "share", "calls", title);
    for (const auto& [name, row] : rows) {
      if (row.first < sum * 5e-4) break;
      std::printf("%-9.3f %-7.3f %-7.1f %.140s\n", row.first / num_steps, row.first / sum,
                  static_cast<double>(row.second) / num_steps, name.c_str());
    }
    std::printf("%-9.3f %-7.3f %-7s all\n", sum / num_steps, 1.0, "");
  }

 private:
  std::map<std::string, std::pair<double, int>> rows_;
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

void print_kernels(const std::vector<kineto::KinetoEvent>& events, int num_steps) {
  Table kernels;
  for (const auto& e : events)
    if (is_kernel(e)) kernels.add(e.name(), static_cast<double>(e.durationNs()) * 1e-6);
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
                 static_cast<double>(e.durationNs()) * 1e-6);
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
      const double ms = static_cast<double>(e->durationNs()) * 1e-6;
      table.add(e->name(), ms);
      if (!open.empty()) table.add(open.back().name, -ms);
      open.push_back({e->endNs(), e->name()});
    }
  }
  table.print("operation (calls: and what it calls)", num_steps);
}

torch::profiler::impl::ProfilerConfig profiler_config() {
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO);
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
    const auto result = take(std::move(batches), train::learning_rate(config, step++));
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
  const auto profiled = [&](train::Stepper& take) {
    kineto::enableProfiler(profiler_config(), activities(config),
                           {at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE,
                            at::RecordScope::BACKWARD_FUNCTION});
    for (int i = 0; i < o.num_profiled; ++i) step_by(take);
    return kineto::disableProfiler();
  };
  auto result = profiled(stepper);
  if (!o.trace.empty()) result->save(o.trace);
  if (!on_device) return print_host_table(result->events(), o.num_profiled);
  print_kernels(result->events(), o.num_profiled);
  if (stepper.num_replayed() > 0) {
    stepper.release();
    step_by(without_graph);  // makes what the graphs had
    result = profiled(without_graph);
  }
  print_sections(result->events(), o.num_profiled);
}

int main(int argc, char** argv) try {
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
