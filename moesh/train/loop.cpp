#include "moesh/train/loop.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <set>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/timeline.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/comm/launch.h"
#include "moesh/comm/observers.h"
#include "moesh/config/options.h"
#include "moesh/fsdp/fsdp.h"
#include "moesh/kernels/float8.h"
#include "moesh/kernels/gpu_kernels.h"
#include "moesh/optim/rules.h"
#include "moesh/pipeline/simulate.h"
#include "moesh/train/checkpointer.h"
#include "moesh/train/metrics/record.h"
#include "moesh/train/metrics/sink.h"
#include "moesh/train/prefetch.h"
#include "moesh/train/routing.h"
#include "moesh/train/step.h"
#include "moesh/train/stop.h"
#include "moesh/train/timeline/record.h"
#include "moesh/train/timeline/trace.h"
#include "moesh/train/validation.h"

namespace moesh::train {
namespace {

using Clock = std::chrono::steady_clock;

// Whether any rank was told to stop, or its time is over: all ranks agree, so that none waits for
// another.
bool stop_agreed(comm::Group& world, const Config& config, at::Device device,
                 Clock::time_point start) {
  const double minutes = seconds_since(start) / 60;
  const bool is_over = config.training.max_minutes > 0 && minutes >= config.training.max_minutes;
  const bool stops = is_over || stop_signal() != 0;
  if (world.size() == 1) return stops;  // no wait for the device
  const at::Tensor mine = at::full({1}, stops, at::TensorOptions(device).dtype(at::kInt));
  return world.all_reduce(mine, comm::ReduceOp::max).item<int>() != 0;
}

void warn_of_bias_kept_apart(const Config& config) {
  if (!config.checkpoint.enable || config.moe.load_balance_coeff == 0 ||
      models::facts(config.model.architecture).stores_expert_bias)
    return;
  log_warn(
      describe_option(config, "moe.load_balance_coeff"), ", and the files of a ", config.model.name,
      " have no place for an expert bias: checkpoints keep it beside the optimizer's state, and "
      "programs that read only their weights choose experts without it");
}

void warn_of_other_dropout(const Config& config) {
  if (config.lora.adapter.empty()) return;
  const double before =
      models::read_adapter(config.model.architecture, config.lora.adapter).dropout;
  if (before > 0 && before != config.lora.dropout)
    log_warn(config.lora.adapter, " was trained with lora_dropout = ", before, ", and ",
             describe_option(config, "lora.dropout"), "; set lora.dropout to ", before,
             " to go on as before");
}

void warn_of_few_micro_batches(const Config& config) {
  const std::int64_t degree = config.parallelism.pipeline_parallel_degree,
                     num_micro = num_micro_batches(config);
  if (num_micro >= degree) return;
  const auto schedule = schedule_of(pipeline_options(config), static_cast<std::size_t>(num_micro));
  log_warn("a step has ", num_micro, num_micro == 1 ? " micro-batch" : " micro-batches",
           " for the ", degree, " ranks of pp, which wait ",
           std::lround(100 * pipeline::simulate(schedule).bubble_fraction()),
           " % of the time; set training.gradient_accumulation_steps to ", degree,
           " or more, or raise training.global_batch_size");
}

// Keys that are not as they are by default, and that this run does not read.
void warn_of_keys_without_effect(const Config& config) {
  const auto warn = [&](const std::string& key, const std::string& why) {
    const config::Option& o = *config::find_option(key);
    if (o.get(config) != o.default_in(config))
      log_warn(describe_option(config, key), ", which has no effect: ", why);
  };
  if (num_mtp_layers(config) == 0)
    warn("training.mtp_loss_weight",
         "the model has no layers for multi-token prediction (model.num_mtp_layers)");
  const optim::RuleKind& kind = optim::find_rule(config.optimizer.name);
  std::set<std::string> read(kind.keys.begin(), kind.keys.end()), others;
  if (kind.is_for)
    for (const std::string& key : optim::find_rule(kind.rule_of_others).keys) read.insert(key);
  for (const optim::RuleKind& other : optim::rule_kinds())
    for (const std::string& key : other.keys)
      if (!read.contains(key)) others.insert(key);
  for (const std::string& key : others)
    warn("optimizer." + key, describe_option(config, "optimizer.name"));
  if (read.contains("muon_by_head") && !config::model_value(config, "model.kv_lora_rank"))
    warn("optimizer.muon_by_head", config.model.name + " has no multi-head latent attention");
}

void warn_of_no_overlap(const Config& config) {
  if (!config.parallelism.overlap_experts) return;
  const auto nothing = [&](const std::string& why) {
    log_warn(describe_option(config, "parallelism.overlap_experts"), ", and ", why);
  };
  if (const MeshShape mesh = mesh_shape(config); mesh.ep * mesh.etp == 1)
    nothing("ep and etp are 1: no rows travel to experts that could be hidden");
  if (num_micro_batches(config) == 1)
    nothing(
        "a step has one micro-batch, beside which no other computes; set "
        "training.gradient_accumulation_steps to 2 or more, and data.batch_size lower");
}

void warn_of_slow_float8(const Config& config) {
  const kernels::UseGpuKernels chosen(gpu_kernels(config));
  if (!float8(config).has_products() ||
      kernels::has_float8_kernels(device(config), scalar_type(config), config.training.float8_tile))
    return;
  log_warn(describe_option(config, "training.float8"), ", ",
           describe_option(config, "training.float8_dense"),
           ": products in float8 are computed by LibTorch's operations, by rounding what is "
           "multiplied, and take longer than without; moesh has kernels for bfloat16 and tiles of "
           "128 on GPUs of compute capability 9.0");
}

// The time that Open MPI leaves its processes between SIGTERM and SIGKILL; other launchers leave
// half a minute or more.
double seconds_before_kill() {
  if (!std::getenv("OMPI_COMM_WORLD_SIZE")) return std::numeric_limits<double>::infinity();
  for (const char* name :
       {"OMPI_MCA_odls_base_sigkill_timeout", "PRTE_MCA_odls_base_sigkill_timeout"})
    if (const char* text = std::getenv(name)) return std::atof(text);
  return 1;
}

void warn_if_too_slow_to_stop(double seconds) {
  if (seconds <= seconds_before_kill()) return;
  log_warn("a step and its save take ", seconds, " s, and mpirun kills its processes ",
           seconds_before_kill(),
           " s after it is told to stop: the last step would be lost; start it with "
           "--mca odls_base_sigkill_timeout ",
           std::ceil(2 * seconds));
}

bool has_diverged(const Config& config, const Position& position) {
  const auto limit = config.training.max_skipped_steps;
  return limit > 0 && position.num_skipped >= limit;
}

// All ranks throw the same: that of the rank which has the largest weight, or one that is not
// finite.
[[noreturn]] void throw_diverged(comm::Group& world, const Config& config, models::Model& model,
                                 const Position& position, const std::filesystem::path& healthy) {
  double largest = -1;
  std::string name;
  model.each_param([&](Stored& w, bool) {
    const at::Tensor numbers = raw::numbers(w);
    double size = numbers.numel() == 0 ? 0 : numbers.abs().max().item<double>();
    if (!std::isfinite(size)) size = std::numeric_limits<double>::infinity();
    if (size > largest) largest = size, name = w.spec.name;
  });
  const double of_all =
      world
          .all_reduce(at::full({1}, largest, at::TensorOptions(device(config)).dtype(at::kDouble)),
                      comm::ReduceOp::max)
          .item<double>();
  checkpoint::together(world, [&] {
    MOESH_CHECK(largest < of_all, ErrorKind::diverged,
                "the run has diverged: ", position.num_skipped, " steps in a row, ",
                position.step - position.num_skipped + 1, " to ", position.step,
                ", had a loss or gradient that is not finite, or no token that counts, and were "
                "skipped (training.max_skipped_steps); the largest weight is ",
                largest, ", in '", name, "'. ",
                healthy.empty()
                    ? std::string("Lower optimizer.lr and start again")
                    : detail::concat("Lower optimizer.lr and resume from '", healthy.string(),
                                     "', after which gradients were still finite: move the later "
                                     "checkpoints away"));
  });
  throw Error(ErrorKind::internal, "no rank has the largest weight");
}

// A router that gets a NaN throws at once: the step is named with it.
template <class F>
auto of_step(std::int64_t step, const F& f) {
  try {
    return f();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::diverged) throw;
    throw Error(e.kind(), detail::concat("the run has diverged in step ", step, ": ", e.what()));
  }
}

// Counts those of the whole model, of which a rank may have one stage.
std::optional<std::int64_t> num_trained_parameters(const Config& config) {
  if (!has_lora(config) && config.training.freeze.empty()) return {};
  const models::AnyConfig& model = config.model.architecture;
  const OneRankScope scope;
  std::int64_t num = 0;
  models::make_model(model, {.device = at::kMeta,
                             .lora = lora(config).of(model),
                             .is_frozen = frozen(config).is_frozen()})
      ->each_param([&](Stored& w, bool) {
        if (w.spec.trained) num += c10::multiply_integers(w.spec.shape);
      });
  return num;
}

RunFacts facts_of(const Config& config, const models::Model& model, const CallerInfo& caller,
                  std::int64_t first_step) {
  const int num_ranks = mesh_shape(config).num_ranks();
  const bool is_known =
      config.training.device == "cuda" && config.training.dtype == "bfloat16";  // see peak.h
  const double of_one = config.metrics.peak_tflops > 0 ? config.metrics.peak_tflops
                        : is_known ? peak_tflops(device_name(config.training.device))
                                   : 0;
  // Ranks in threads of one process have its device together.
  const int processes = comm::num_launched_processes();
  return {.first_step = first_step,
          .num_ranks = num_ranks,
          .num_parameters = model.num_parameters(),
          .num_active_parameters = model.num_active_parameters(),
          .num_trained_parameters = num_trained_parameters(config),
          .flops_per_token = model.flops_per_token(config.data.sequence_length),
          .peak_tflops = of_one * std::max(1, processes),
          .estimated_memory = caller.estimated_memory,
          .memory_before_gib = caller.memory_before_gib};
}

// Handles the result of the last step.
StepRecord record_of(const Config& config, const RunFacts& facts, const Position& position,
                     const StepResult& result) {
  const auto& [g, u] = result;
  const bool counts_are_due = position.step % config.metrics.expert_counts_freq == 0;
  return {.step = position.step,
          .time = seconds_since_1970(),
          .loss = g.loss,
          .total_loss = g.total_loss,
          .auxiliary = g.auxiliary,
          .grad_norm = u.grad_norm,
          .max_logit = u.max_logit,
          .num_tokens = g.num_tokens,
          .num_tokens_all = position.num_tokens,
          .flops_per_token = facts.flops_per_token,
          .peak_tflops = facts.peak_tflops,
          .memory_gib = peak_memory_gib(config.training.device),
          .experts = expert_load(g.counts_E),
          .bias = u.bias,
          .counts_E = counts_are_due ? g.counts_E : std::vector<at::Tensor>{},
          .float8 = float8_shares(g.float8_counts),
          .skipped = u.skipped};
}

// A run, for all ranks of this process.
struct RunOfRanks {
  const Config& config;
  const CallerInfo& caller;
  const data::Dataset& dataset;
  std::string own_data;
  Clock::time_point start = Clock::now();
  std::vector<ValidationSet> validation_sets = open_validation(config);
  RunSummary summary = {};                // by rank 0
  std::atomic<bool> interrupted = false;  // all ranks say the same
};

void tell_before_first_step(const Config& config) {
  warn_of_bias_kept_apart(config);
  warn_of_few_micro_batches(config);
  warn_of_no_overlap(config);
  warn_of_keys_without_effect(config);
  warn_of_other_dropout(config);
  warn_of_slow_float8(config);
  if (config.lora.base != "compute")
    log_info("lora.base: ", describe_quantization(quantization(config)),
             ", all others of the frozen model in ", config.training.dtype);
}

// Measurements and reports of rank 0.
class Reporter {
 public:
  Reporter(RunOfRanks& run, const RunFacts& facts, const Mesh& mesh)
      : run_(run), facts_(facts), sinks_(open_sinks(run.config, facts)), clock_(run.start) {
    const Config& config = run.config;
    run.summary.first_step = facts.first_step;
    run.summary.folder = config.metrics.folder;
    if (!config.metrics.quiet)
      std::fputs(run_header(config, facts, run.dataset.describe()).c_str(), stdout);
    std::fflush(stdout);
    if (dispatcher(config) == nn::Dispatcher::automatic && mesh.size(ep) * mesh.size(etp) > 1)
      log_info("dispatcher auto: ", nn::describe_choice(nn::transport_of(device(config)),
                                                        mesh.shape(), router_config(config)));
  }

  // Between these two are the messages of the step: not those of validation and saving.
  void begin_messages() { sent_.take(); }
  void end_messages() { bytes_sent_ = sent_.take(); }
  void end_step() { sections_ = clock_.take(); }

  void report(const Position& position, const StepResult& result, double lr,
              std::vector<ValidationLoss> validation) {
    StepRecord record = record_of(run_.config, facts_, position, result);
    record.num_read = num_read_, record.lr = lr, record.seconds = sections_.of_step(),
    record.sections = sections_;
    record.sent = std::move(bytes_sent_), record.validation = std::move(validation);
    for (const auto& sink : sinks_) sink->write(record);
    if (run_.caller.on_step) run_.caller.on_step(record);
    for (const std::string& warning : collapse_.observe(result.gradients.counts_E))
      log_warn(warning);
    if (was_finite_ && !std::isfinite(record.loss))
      log_warn("the loss of step ", record.step, " is ", record.loss, ": the step changes nothing");
    was_finite_ = std::isfinite(record.loss);
    RunSummary& summary = run_.summary;
    summary.losses.push_back(record.loss);
    if (summary.num_steps++ == 0)
      summary.first_step_seconds = record.seconds;
    else
      seconds_.push_back(record.seconds);
  }

  // Before the last save, which may throw: then metrics still say what they could not write.
  void end_metrics() {
    for (const auto& sink : sinks_) sink->finish();
  }

  // How long a save took, as soon as one has ended.
  void note_save(std::optional<double> seconds) {
    if (!seconds || std::exchange(is_slowness_known_, true)) return;
    warn_if_too_slow_to_stop(sections_.of_step() + *seconds);
  }

  void finish(const std::string& trace) {
    run_.summary.trace = trace;
    if (seconds_.empty()) return;
    const auto middle = seconds_.begin() + static_cast<std::ptrdiff_t>(seconds_.size() / 2);
    std::nth_element(seconds_.begin(), middle, seconds_.end());
    run_.summary.step_seconds = *middle;
  }

 private:
  RunOfRanks& run_;
  const RunFacts& facts_;
  MetricSinks sinks_;
  const std::int64_t num_read_ =  // tokens of a step
      sample_order(run_.config).num_per_step() * run_.config.data.sequence_length;
  SectionClock clock_;
  comm::SentBytes sent_;
  std::map<std::string, std::int64_t> bytes_sent_;
  SectionTimes sections_;
  CollapseWatch collapse_;
  std::vector<double> seconds_;  // of each step but the first
  bool is_slowness_known_ = false, was_finite_ = true;
};

void run_rank(comm::Group& world, RunOfRanks& run) {
  const Config& config = run.config;
  const Mesh mesh(world, mesh_shape(config));
  const MeshScope scope(mesh);
  const auto model = make_model(config);
  const auto optimizer = make_optimizer(*model, config);
  Checkpointer checkpointer(config, world, *model, *optimizer, run.own_data);
  Position position = checkpointer.start();
  const std::int64_t first_step = position.step, num_steps = config.training.steps;
  const RunFacts facts = facts_of(config, *model, run.caller, first_step);
  std::optional<Reporter> reporter;
  if (world.rank() == 0) {
    tell_before_first_step(config);
    reporter.emplace(run, facts, mesh);
  }
  StepTrace trace(config, world, first_step);
  RoutingFiles routing(config, *model, world);
  Stepper take_step(*model, *optimizer, routing.with_probe(step_options(config)),
                    use_graph(config));
  const at::Device device = config::device(config);
  const auto stops = [&] { return stop_agreed(world, config, device, run.start); };
  const auto validation = [&] {
    const InSection section(Section::validation);
    return take_step.beside(
        [&] { return validate_model(*model, config, mesh, run.validation_sets, stops); });
  };
  const auto rate = learning_rates(config);
  const auto make_batches = host_batches(config, run.dataset, mesh);
  const std::int64_t samples = sample_order(config).num_per_step();
  // The batches of the next step are made while this one computes.
  Prefetch<std::vector<models::MicroBatch>> next([&](std::int64_t data_position) {
    set_log_rank(world.rank());
    return make_batches(data_position);
  });
  if (first_step < num_steps) next.start(position.data_position);
  for (std::int64_t step = first_step; step < num_steps; ++step) {
    trace.begin_step(step + 1);
    auto batches = [&] {
      const InSection section(Section::data);
      return on_device(device, next.take());
    }();
    const std::int64_t data_position = position.data_position + samples;
    if (step + 1 < num_steps) next.start(data_position);
    const double lr = rate(step);
    if (reporter) reporter->begin_messages();
    routing.begin_step(step + 1);
    const StepResult result = of_step(step + 1, [&] {
      const auto every = config.metrics.float8_freq;
      return take_step(std::move(batches), lr, every > 0 && (step + 1) % every == 0);
    });
    if (reporter) reporter->end_messages();
    routing.end_step(step + 1);
    position = {.step = step + 1,
                .data_position = data_position,
                .num_skipped = result.update.skipped ? position.num_skipped + 1 : 0,
                .num_tokens = position.num_tokens + result.gradients.num_tokens};
    bool stop = stops();
    trace.end_step();
    if (reporter) reporter->end_step();
    std::vector<ValidationLoss> losses;
    // A run that is told to stop has little time left, and saves.
    if (validation_is_due(config, step + 1) && !(stop && step + 1 < num_steps)) {
      auto found = of_step(step + 1, validation);
      stop = stop || !found;
      if (found) losses = std::move(*found);
    }
    if (reporter) reporter->report(position, result, lr, std::move(losses));
    if (stop && step + 1 < num_steps) run.interrupted = true;
    if (has_diverged(config, position))
      throw_diverged(world, config, *model, position, checkpointer.last_healthy(position));
    if (!stop) {
      const InSection section(Section::saving);
      checkpointer.after_step(position);
    }
    trace.after_step(step + 1, stop);
    if (stop) break;
    if (reporter) reporter->note_save(checkpointer.save_seconds());
  }
  if (reporter) reporter->end_metrics();
  checkpointer.finish(position);
  if (reporter) reporter->finish(trace.summary());
}

RunSummary train_on(const Config& config, const CallerInfo& caller, const data::Dataset& dataset,
                    const std::string& own_data) {
  RunOfRanks run{.config = config, .caller = caller, .dataset = dataset, .own_data = own_data};
  run.summary.entropy = dataset.entropy();
  const SignalScope signals;
  LostRankReport lost_rank_report(config);
  comm::LaunchOptions options = launch_options(config);
  options.after_fault = [&](int rank, const std::exception_ptr& fault) {
    lost_rank_report.threw(rank, fault);
  };
  if (config::profile_steps(config) && config.training.device == "cuda") prepare_kernels();
  comm::launch(
      mesh_shape(config).num_ranks(),
      [&](comm::Group& world) {
        lost_rank_report.add(world.rank());
        run_rank(world, run);
      },
      options);
  run.summary.interrupted = run.interrupted;
  return run.summary;
}

}  // namespace

RunSummary train(const Config& config, const CallerInfo& caller) {
  return train_on(config, caller, *open_dataset(config), "");
}

RunSummary train(const Config& config, const data::Dataset& dataset, const CallerInfo& caller) {
  MOESH_CHECK(config.data.path.empty() && config.data.source.empty(), ErrorKind::config,
              "train() is given a dataset, and the configuration names files to train on, too; "
              "leave out data.path and data.source");
  MOESH_CHECK(dataset.sequence_length() == config.data.sequence_length, ErrorKind::config,
              "the dataset (", dataset.describe(), ") has sequences of ", dataset.sequence_length(),
              " tokens, and ", describe_option(config, "data.sequence_length"),
              "; they must be equal");
  const auto vocab = models::facts(config.model.architecture).vocab_size;
  MOESH_CHECK(dataset.vocab_size() <= vocab, ErrorKind::config, "the dataset (", dataset.describe(),
              ") has ", dataset.vocab_size(),
              " different tokens, and the vocabulary of the model has ", vocab,
              "; set model.vocab_size to ", dataset.vocab_size(), " or more");
  return train_on(config, caller, dataset, dataset.describe());
}

}  // namespace moesh::train
