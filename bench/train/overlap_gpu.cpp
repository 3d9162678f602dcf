// What parallelism.overlap_experts gains on a GPU, on links on which rows travel as long as a rank
// computes. Four ranks are threads that share the GPU (ep 4, or pp 2 x ep 2), and their exchanges
// sleep beside the computation (comm/paced.h).
//
//     bench_overlap_gpu [--part TRAFFIC/COMPUTE] [--slept MS] [--repeat N]
//                       [--only-real | --only-slept] [--schedule NAME] [--trace FOLDER]
//                       [option ...]
//
// For each schedule, first a step without slow links, one micro-batch at a time, says for
// every exchange of experts what a rank computes before it (between marks on the stream on which it
// computes) and how many bytes it sends. The links are then such that all of these bytes take as
// long as all of that (or TRAFFIC/COMPUTE of it), and the step is measured on them, one micro-batch
// at a time and two. "Expected" is what the simulator makes of the same numbers: without pp the
// turns of two lanes, with pp the actions of the schedule as well
// (pipeline/simulate.h). Links are "fast" (those of the machine), or slow for "one" micro-batch at
// a time or "two". A step is the time on the device from its first to its last mark, of the slowest
// rank, the median of the steps; "exposed" is how much of it its computing stream waits for rows of
// experts and their counts; "host" is the time in which its host queues the step, and waits for
// counts; "first" is that of the step before those that are measured, in which threads are new.
//
// The first line says what a new thread costs: the host's time for its first attention, forward and
// backward, and for its second. LibTorch keeps cuDNN's plans of attention for each thread.
//
// real: the model computes. The ranks share the multiprocessors, so what a rank computes is
// measured with all of them at work. Without pp they all work and wait at the same times. With pp
// they do not: a rank computes faster while others wait, which the simulator does not know, so it
// expects more than is measured.
//
// slept: instead, after each message of rows a kernel of one block sleeps on the computing stream,
// in backward twice as long, as if each rank had a GPU of its own; the model is tiny.
//
// The loss must be the same to the last bit, and where compute sleeps gradients, too. cuDNN's
// backward of attention may add in another order each time: so the last column says whether the
// measured steps of one setting have the same gradients, and only then whether the settings have.
//
// --trace FOLDER records one more step of each "two", not measured, in FOLDER/SCHEDULE-COMPUTE
// (docs/traces.md).
//
// --training.device=cpu tries this program where there is no GPU.

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/train/pairs.h"
#include "moesh/base/error.h"
#include "moesh/base/this_thread.h"
#include "moesh/comm/cuda/sleep.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/nccl/nccl_group.h"
#include "moesh/comm/observers.h"
#include "moesh/config/merge.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/train/build.h"
#include "moesh/train/timeline/trace.h"

namespace moesh::train {
namespace {

constexpr int kMicroBatches = 8;
constexpr double kLatency = 20e-6;

c10::Stream current_stream() {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  return guard.getStream(guard.getDevice());
}

// A moment of the stream on which this rank computes; on the CPU, of its thread.
class Moment {
 public:
  explicit Moment(bool on_gpu) {
    if (on_gpu)
      event_.emplace(at::kCUDA, c10::EventFlag::BACKEND_DEFAULT).record(current_stream());
    else
      time_ = std::chrono::steady_clock::now();
  }
  // When the device has come to both.
  friend double seconds(const Moment& from, const Moment& to) {
    if (from.event_) return 1e-3 * from.event_->elapsedTime(*to.event_);
    return std::chrono::duration<double>(to.time_ - from.time_).count();
  }

 private:
  std::optional<c10::Event> event_;
  std::chrono::steady_clock::time_point time_;
};

// What a rank computes, and what it then waits for: one exchange, or several that are under way.
struct Part {
  double compute = 0, bytes = 0;
  int num_exchanges = 0;
  bool has_rows = false;  // else counts, for which the host waits
  bool is_backward = false;
};

// The waits of a step.
class Waits final : public comm::ThreadObserver {
 public:
  Waits(bool on_gpu, double slept) : on_gpu_(on_gpu), slept_(slept) {}

  void begin() {
    spans_.clear();
    transfer_bytes = 0;
    begin_.emplace(on_gpu_);
  }
  void end() { end_.emplace(on_gpu_); }

  void called(const comm::Operation& o) override {
    const bool is_expert = o.group.name().starts_with("ep");
    const auto bytes =
        static_cast<double>(comm::sent_bytes(o.op, o.bytes, o.own_bytes(), o.group.size()));
    if (o.op == comm::Collective::send) transfer_bytes = bytes;
    called_[o.number] = {.is_expert = is_expert,
                         .has_rows = o.op == comm::Collective::all_to_all,
                         .place = this_thread.place,
                         .bytes = bytes};
  }
  void waits(std::int64_t number) override {
    const auto found = called_.find(number);
    if (found == called_.end()) return;
    WaitSpan span{.begin = Moment(on_gpu_), .end = std::nullopt, .part = {}};
    span.part.is_backward = !at::GradMode::is_enabled();
    for (auto& [other, call] : called_)  // with what was started beside it
      if (found->second.is_expert && call.is_expert && call.place == found->second.place &&
          !call.is_counted) {
        call.is_counted = true;
        span.part.bytes += call.bytes;
        ++span.part.num_exchanges;
        span.part.has_rows = span.part.has_rows || call.has_rows;
      }
    span.is_expert = found->second.is_expert;
    waiting_[number] = spans_.size();
    spans_.push_back(std::move(span));
  }
  void ended(std::int64_t number) override {
    const auto waiting = waiting_.extract(number);
    const auto call = called_.extract(number);
    if (!waiting) return;
    spans_[waiting.mapped()].end.emplace(on_gpu_);
    if (slept_ == 0 || !call.mapped().is_expert || !call.mapped().has_rows) return;
    for (const auto& [other, c] : called_)
      if (c.is_expert && c.has_rows && c.place == call.mapped().place) return;  // of one message
    const double time = at::GradMode::is_enabled() ? slept_ : 2 * slept_;
    if (!on_gpu_) return std::this_thread::sleep_for(std::chrono::duration<double>(time));
    const char* error =
        comm::cuda::sleep(current_stream().native_handle(), static_cast<std::int64_t>(1e9 * time));
    MOESH_CHECK(!error, ErrorKind::device, error);
  }

  // When the device is done.
  double step() const { return seconds(*begin_, *end_); }
  double exposed(bool of_experts) const {
    double sum = 0;
    for (const WaitSpan& s : spans_)
      if (s.is_expert == of_experts) sum += seconds(s.begin, *s.end);
    return sum;
  }
  // In the order of the stream, and what is computed after the last one. Only where one micro-batch
  // is under way.
  std::pair<std::vector<Part>, double> parts() const {
    std::vector<Part> all;
    const Moment* since = &*begin_;
    double compute = 0;
    for (const WaitSpan& s : spans_) {
      compute += seconds(*since, s.begin);
      since = &*s.end;
      if (s.part.num_exchanges == 0) continue;
      all.push_back(s.part);
      all.back().compute = std::exchange(compute, 0);
    }
    return {std::move(all), compute + seconds(*since, *end_)};
  }
  double transfer_bytes = 0;  // to the next stage

 private:
  struct Called {
    bool is_expert = false, has_rows = false, is_counted = false;
    std::size_t place = 0;  // of the lane
    double bytes = 0;
  };
  struct WaitSpan {
    Moment begin;
    std::optional<Moment> end;
    Part part;
    bool is_expert = false;
  };
  bool on_gpu_;
  double slept_;
  std::optional<Moment> begin_, end_;
  std::map<std::int64_t, Called> called_;
  std::map<std::int64_t, std::size_t> waiting_;
  std::vector<WaitSpan> spans_;
};

struct Measured {
  double step = 0, exposed = 0, others = 0, host = 0;  // medians, of the slowest rank
  double first = 0;                                    // of the host, for the step before
  double loss = 0;
  std::vector<std::vector<double>> gradients;  // a sum of all, by step and rank
  double transfer_bytes = 0;
  // By stage of pp, the largest of its ranks.
  std::vector<std::vector<Part>> parts;
  std::vector<double> rest;

  bool repeats_its_bits() const {
    return std::ranges::all_of(gradients, [&](const auto& g) { return g == gradients[0]; });
  }
  double compute() const {
    double most = 0;
    for (std::size_t stage = 0; stage < parts.size(); ++stage) {
      double sum = rest[stage];
      for (const Part& p : parts[stage]) sum += p.compute;
      most = std::max(most, sum);
    }
    return most;
  }
  double bytes() const {
    double most = 0;
    for (const auto& of_stage : parts) {
      double sum = 0;
      for (const Part& p : of_stage) sum += p.bytes;
      most = std::max(most, sum);
    }
    return most;
  }
};

double sum_of_gradients(models::Model& model) {
  double sum = 0;
  model.each_param([&](Stored& w, bool) {
    if (const at::Tensor& g = w.value.grad(); g.defined())
      sum += g.to(at::kDouble).abs().sum().item<double>();
  });
  return sum;
}

// The host's seconds.
double since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Measured measure(const Config& config, const std::optional<comm::Links>& links, double slept,
                 int repeat) {
  Measured result;
  std::mutex mutex;
  comm::LaunchOptions options = launch_options(config);
  options.links = links;
  const auto shape = mesh_shape(config);
  std::vector<std::vector<double>> steps(static_cast<std::size_t>(repeat)), exposed(steps),
      others(steps), hosts(steps);
  result.parts.resize(static_cast<std::size_t>(shape.pp));
  result.rest.resize(static_cast<std::size_t>(shape.pp));
  result.gradients.resize(static_cast<std::size_t>(repeat),
                          std::vector<double>(static_cast<std::size_t>(shape.num_ranks())));
  comm::launch(
      shape.num_ranks(),
      [&](comm::Group& world) {
        const Mesh mesh(world, shape);
        const MeshScope scope(mesh);
        const auto model = make_model(config);
        const auto dataset = open_dataset(config);
        const auto batches = step_batches(config, *dataset, mesh, 0);
        double loss = 0;
        const auto step = [&] {
          model->each_param([](Stored& w, bool) { w.value.mutable_grad().reset(); });
          loss = accumulate_gradients(*model, batches, step_options(config)).total_loss;
        };
        const auto device = config::device(config);
        Waits waits(device.is_cuda(), slept);
        const auto begin = std::chrono::steady_clock::now();
        waits.begin(), step();  // kernels are chosen, and memory is taken
        const double first = since(begin);
        for (int i = 0; i < repeat; ++i) {
          if (device.is_cuda()) current_stream().synchronize();
          {
            const comm::ObserverPause quiet;
            world.barrier();
          }
          const auto called = std::chrono::steady_clock::now();
          waits.begin();
          step();
          waits.end();
          const double host = since(called);
          if (device.is_cuda()) current_stream().synchronize();
          const double gradients = sum_of_gradients(*model);
          const std::lock_guard lock(mutex);
          const auto at = static_cast<std::size_t>(i);
          hosts[at].push_back(host);
          result.gradients[at][static_cast<std::size_t>(world.rank())] = gradients;
          steps[at].push_back(waits.step());
          exposed[at].push_back(waits.exposed(true));
          others[at].push_back(waits.exposed(false));
        }
        const auto [parts, rest] = waits.parts();
        StepTrace trace(config, world, 0);  // of nothing, where no step is to be recorded
        if (config::profile_steps(config)) {
          std::filesystem::create_directories(config.metrics.folder);
          trace.begin_step(1);
          step();
          if (device.is_cuda()) current_stream().synchronize();
          trace.end_step();
          trace.after_step(1, /*ends=*/true);
        }
        const std::lock_guard lock(mutex);
        const auto stage = static_cast<std::size_t>(mesh.coordinate(pp));
        auto& all = result.parts[stage];
        all.resize(std::max(all.size(), parts.size()));
        for (std::size_t i = 0; i < parts.size(); ++i) {
          const Part before = all[i];
          all[i] = parts[i];
          all[i].compute = std::max(before.compute, parts[i].compute);
          all[i].bytes = std::max(before.bytes, parts[i].bytes);
        }
        result.rest[stage] = std::max(result.rest[stage], rest);
        result.transfer_bytes = std::max(result.transfer_bytes, waits.transfer_bytes);
        result.loss = loss;
        result.first = std::max(result.first, first);
      },
      options);
  const auto median = [](const std::vector<std::vector<double>>& of_ranks) {
    std::vector<double> most;
    for (const auto& all : of_ranks) most.push_back(*std::ranges::max_element(all));
    return median_of(most).value;
  };
  result.step = median(steps), result.exposed = median(exposed), result.others = median(others);
  result.host = median(hosts);
  return result;
}

// The parts on links, as the simulator takes them.
pipeline::Lane lane_of(const std::vector<Part>& parts, double bandwidth) {
  pipeline::Lane lane;
  for (const Part& p : parts)
    lane.push_back({.compute = p.compute,
                    .message = p.num_exchanges * kLatency + p.bytes / bandwidth,
                    .takes_turns = p.has_rows});
  return lane;
}

// Without pp: all micro-batches, or every other one in each lane.
double expected_in_lanes(const Measured& free, double bandwidth, bool is_two) {
  const auto lane = lane_of(free.parts[0], bandwidth);
  MOESH_CHECK(lane.size() % kMicroBatches == 0, "a step has ", lane.size(),
              " exchanges, and as many in each of its ", kMicroBatches, " micro-batches");
  if (!is_two) return seconds_apart(lane) + free.rest[0];
  const std::size_t count = lane.size() / kMicroBatches;
  std::vector<pipeline::Lane> lanes(2);
  for (std::size_t i = 0; i < lane.size(); ++i) {
    auto& to = lanes[(i / count) % 2];
    to.push_back(lane[i]);
    if ((i + 1) % count == 0) to.push_back({.message = 1e-9});  // the other's turn after a backward
  }
  return pipeline::seconds_in_turns(lanes) + free.rest[0];
}

// The mean of an action of a rank: its exchanges of one direction, by their place in it.
pipeline::Lane action_of(const std::vector<Part>& parts, double bandwidth, bool is_backward,
                         int num_actions) {
  std::vector<Part> own;
  for (const Part& p : parts)
    if (p.is_backward == is_backward) own.push_back(p);
  const auto num = static_cast<std::size_t>(num_actions);
  MOESH_CHECK(!own.empty() && own.size() % num == 0, "a rank has ", own.size(),
              " exchanges in its ", num_actions, is_backward ? " backwards" : " forwards",
              ", and as many in each");
  std::vector<Part> mean(own.size() / num);
  for (std::size_t i = 0; i < own.size(); ++i) {
    Part& m = mean[i % mean.size()];
    const Part before = m;
    m = own[i];
    m.compute = before.compute + own[i].compute / static_cast<double>(num);
    m.bytes = before.bytes + own[i].bytes / static_cast<double>(num);
  }
  return lane_of(mean, bandwidth);
}

double expected_of_schedule(const Config& config, const Measured& free, double bandwidth,
                            bool is_joined) {
  const auto options = pipeline_options(config);
  const int num_ranks = mesh_shape(config).pp, v = options.stages_of_a_rank;
  const auto order =
      pipeline::make_schedule(options.schedule, num_ranks, v, kMicroBatches, is_joined);
  const double transfer = kLatency + free.transfer_bytes / bandwidth;
  pipeline::Costs costs{.stages = {}};
  for (int stage = 0; stage < order.num_stages; ++stage) {
    const auto& parts = free.parts[static_cast<std::size_t>(order.rank_with(stage))];
    const auto forward = action_of(parts, bandwidth, false, v * kMicroBatches),
               backward = action_of(parts, bandwidth, true, v * kMicroBatches);
    const double apart_f = seconds_apart(forward), apart_b = seconds_apart(backward),
                 hidden = apart_f + apart_b - pipeline::seconds_in_turns({backward, forward});
    // What goes to another rank is on the link before the rows of the next action.
    const auto sends_to = [&](int other) {
      return other >= 0 && other < order.num_stages &&
             order.rank_with(other) != order.rank_with(stage);
    };
    costs.stages.push_back({.forward = apart_f + sends_to(stage + 1) * transfer,
                            .backward_input = apart_b + sends_to(stage - 1) * transfer,
                            .backward_weight = 0,
                            .forward_links = hidden / 2,
                            .backward_links = hidden / 2});
  }
  return pipeline::simulate(order, costs).time;
}

struct BenchOptions {
  double part = 1, slept = 0.003;
  int repeat = 3;
  std::string schedule, trace;           // empty: all of them, none
  std::vector<bool> kinds{false, true};  // whether compute is slept
  std::vector<std::string> rest;
};

Config config_of(const BenchOptions& bench, const std::string& schedule, bool is_slept,
                 const std::vector<std::string>& more = {}) {
  const bool has_pp = schedule != "none";
  std::vector<std::string> args{
      "--model=mixtral:tiny",
      "--training.device=cuda",
      "--training.dtype=bfloat16",
      "--model.num_layers=4",
      has_pp ? "--mesh=pp=2,dp_shard=2,ep=2" : "--mesh=dp_shard=4,ep=4",
      "--parallelism.moe_dispatcher=all_to_all",
      "--parallelism.fsdp_reshard_after_forward=false",
      "--moe.force_load_balance",
      detail::concat("--training.gradient_accumulation_steps=", kMicroBatches)};
  const std::vector<std::string> sizes =
      is_slept
          ? std::vector<std::string>{"--model.num_experts=16", "--model.top_k=8",
                                     "--data.sequence_length=512", "--data.batch_size=1"}
          : std::vector<std::string>{
                "--model.dim=1024",    "--model.num_heads=16",        "--model.num_kv_heads=16",
                "--model.head_dim=64", "--model.moe_ffn=1536",        "--model.num_experts=16",
                "--model.top_k=4",     "--data.sequence_length=2048", "--data.batch_size=4"};
  args.insert(args.end(), sizes.begin(), sizes.end());
  if (has_pp) args.push_back("--parallelism.pipeline_parallel_schedule=" + schedule);
  args.insert(args.end(), bench.rest.begin(), bench.rest.end());
  args.insert(args.end(), more.begin(), more.end());
  return config::load_config(args);
}

void run_schedule(const BenchOptions& bench, const std::string& schedule, bool is_slept) {
  const bool has_pp = schedule != "none";
  std::vector<std::string> for_two{"--parallelism.overlap_experts=true"};
  if (!bench.trace.empty())
    for_two.insert(for_two.end(),
                   {"--profile.steps=1", detail::concat("--metrics.folder=", bench.trace, "/",
                                                        schedule, is_slept ? "-slept" : "-real")});
  const Config off = config_of(bench, schedule, is_slept),
               on = config_of(bench, schedule, is_slept, for_two);
  const double slept = is_slept ? bench.slept : 0;
  const Measured free = measure(off, std::nullopt, slept, bench.repeat);
  const double traffic = bench.part * free.compute(), bandwidth = free.bytes() / traffic;
  const comm::Links links{.inside = {.latency = kLatency, .bandwidth = bandwidth}, .between = {}};
  const Measured one = measure(off, links, slept, bench.repeat),
                 two = measure(on, links, slept, bench.repeat);
  MOESH_CHECK(one.loss == free.loss && two.loss == free.loss, "the loss is ", free.loss,
              ", on slow links ", one.loss, ", and two at a time ", two.loss);
  const auto expected = [&](bool is_two) {
    return has_pp ? expected_of_schedule(is_two ? on : off, free, bandwidth, is_two)
                  : expected_in_lanes(free, bandwidth, is_two);
  };
  const double expected_one = expected(false), expected_two = expected(true);
  const auto row = [&](const char* variant, const Measured& m, double expected_step) {
    std::printf("%17s %6s %8s | %8.1f ", schedule.c_str(), is_slept ? "slept" : "real", variant,
                1e3 * m.step);
    if (expected_step > 0)
      std::printf("%8.1f %+5.1f%%", 1e3 * expected_step, 100 * (m.step / expected_step - 1));
    else
      std::printf("%8s %6s", "", "");
    std::printf(" | %8.1f %8.1f | %8.1f %8.1f | ", 1e3 * m.exposed, 1e3 * m.others, 1e3 * m.host,
                1e3 * m.first);
  };
  row("fast", free, 0);
  std::printf("computes %.1f ms, rows %.1f ms at %.2f GB/s\n", 1e3 * free.compute(), 1e3 * traffic,
              1e-9 * bandwidth);
  row("one", one, expected_one);
  std::printf("\n");
  row("two", two, expected_two);
  const bool repeat = free.repeats_its_bits() && one.repeats_its_bits() && two.repeats_its_bits();
  const bool are_same = one.gradients == two.gradients && one.gradients == free.gradients;
  std::printf("speed %.2f, exposed %.2f of before, the loss is the same, gradients %s\n",
              one.step / two.step, two.exposed / one.exposed,
              are_same  ? "too"
              : !repeat ? "differ from step to step of one setting"
                        : "DIFFER BETWEEN SETTINGS");
  std::fflush(stdout);
  MOESH_CHECK(are_same || !is_slept, ErrorKind::internal, "gradients of ", schedule,
              " depend on links, or on what computes while rows travel");
}

// What each attention costs the host in a new thread. The third: what the process makes once, and
// what threads that have ended leave for others, is there.
void print_first_attention(const Config& config) {
  const auto device = config::device(config);
  std::array<std::array<double, 2>, 2> seconds{};  // the first and the second; forward, backward
  for (int thread = 0; thread < 3; ++thread)
    comm::launch(
        1,
        [&](comm::Group&) {
          c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
          const auto rows = [&] {
            const auto options = at::TensorOptions(device).dtype(config::scalar_type(config));
            return at::randn({config.data.batch_size, 16, config.data.sequence_length, 64}, options)
                .requires_grad_();
          };
          const at::Tensor q = rows(), k = rows(), v = rows(), dy = at::ones_like(q);
          const auto wait = [&] {
            if (device.is_cuda()) current_stream().synchronize();
          };
          for (auto& time : seconds) {
            wait();
            auto begin = std::chrono::steady_clock::now();
            const at::Tensor y = at::scaled_dot_product_attention(q, k, v, {}, 0, true);
            time[0] = since(begin);
            wait();
            begin = std::chrono::steady_clock::now();
            y.backward(dy);
            time[1] = since(begin);
          }
          wait();
        },
        {.device = device});
  std::printf("attention in a new thread: forward %.1f ms, backward %.1f ms; the next %.1f, %.1f\n",
              1e3 * seconds[0][0], 1e3 * seconds[0][1], 1e3 * seconds[1][0], 1e3 * seconds[1][1]);
}

int run(int argc, char** argv) {
  BenchOptions bench;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&] {
      MOESH_CHECK(i + 1 < argc, ErrorKind::config, name, " takes a value");
      return std::atof(argv[++i]);
    };
    if (name == "--part")
      bench.part = value();
    else if (name == "--slept")
      bench.slept = 1e-3 * value();
    else if (name == "--repeat")
      bench.repeat = static_cast<int>(value());
    else if (name == "--only-real" || name == "--only-slept")
      bench.kinds = {name == "--only-slept"};
    else if (name == "--schedule" || name == "--trace") {
      MOESH_CHECK(i + 1 < argc, ErrorKind::config, name, " takes a value");
      (name == "--trace" ? bench.trace : bench.schedule) = argv[++i];
    } else
      bench.rest.push_back(name);
  }
  comm::prepare_cuda();
  std::vector<std::string> schedules = pipeline::joined_schedule_names();
  schedules.insert(schedules.begin(), "none");
  if (!bench.schedule.empty()) schedules = {bench.schedule};
  const Config any = config_of(bench, schedules[0], bench.kinds[0]);
  if (!bench.trace.empty() && any.training.device == "cuda") prepare_kernels();
  print_first_attention(any);
  std::printf("%17s %6s %8s | %8s %8s %6s | %8s %8s | %8s %8s |\n", "schedule", "comp.", "links",
              "step ms", "expected", "", "exposed", "others", "host", "first");
  for (const bool is_slept : bench.kinds)
    for (const std::string& schedule : schedules) run_schedule(bench, schedule, is_slept);
  return 0;
}

}  // namespace
}  // namespace moesh::train

int main(int argc, char** argv) {
  try {
    return moesh::train::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
