#include "moesh/train/metrics/sink.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>

#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/comm/launch.h"
#include "moesh/config/options.h"

namespace moesh::train {
namespace {

// A line says how many tokens are trained on where they are fewer: nearly all are, but with a loss
// mask or much padding.
constexpr double kFewTrained = 0.9;
constexpr const char* kClearLine = "\r\033[K";

// Where a progress line stands, which the next line on the terminal clears.
std::FILE* progress_on = nullptr;

void clear_progress() {
  if (!progress_on) return;
  std::fputs(kClearLine, progress_on);
  std::fflush(progress_on);
  progress_on = nullptr;
}

struct Field {
  std::string text;
  int color;  // of the terminal
  int rank;   // those of the highest rank are left out first
};

// The first fields that fit into the columns.
std::string joined(std::vector<Field> fields, const ConsoleOptions& options) {
  const auto width = [&] {
    std::size_t sum = 0;
    for (const Field& f : fields) sum += f.text.size() + 2;
    return sum - 2;
  };
  while (fields.size() > 1 && width() > static_cast<std::size_t>(options.columns))
    fields.erase(std::max_element(fields.begin(), fields.end(),
                                  [](const auto& a, const auto& b) { return a.rank < b.rank; }));
  std::string line;
  for (const Field& f : fields) {
    if (!line.empty()) line += "  ";
    line += options.has_colors ? formatted("\033[%dm%s\033[0m", f.color, f.text.c_str()) : f.text;
  }
  return line;
}

std::string duration(double seconds) {
  const auto s = static_cast<long long>(std::llround(std::min(seconds, 1e12)));
  if (s >= 86400) return formatted("%lldd %02lld:%02lld", s / 86400, s / 3600 % 24, s / 60 % 60);
  return formatted("%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
}

std::string trained_text(const config::Config& config) {
  if (!config::has_lora(config)) return "training.freeze matches the others";
  std::set<std::int64_t> ranks;
  for (const auto& [name, target] : config::lora(config).targets) ranks.insert(target.rank);
  return ranks.size() == 1
             ? detail::concat("LoRA of rank ", *ranks.begin())
             : detail::concat("LoRA of ranks ", *ranks.begin(), " to ", *ranks.rbegin());
}

}  // namespace

ConsoleOptions console_options(const config::Config& config, std::int64_t first_step) {
  ConsoleOptions options{
      .num_steps = config.training.steps,
      .first_step = first_step,
      .log_freq = config.metrics.log_freq,
      .is_terminal = isatty(STDOUT_FILENO) != 0 && comm::num_launched_processes() == 0};
  const char* no_color = std::getenv("NO_COLOR");
  options.has_colors = options.is_terminal && !(no_color && *no_color);
  winsize size{};
  if (options.is_terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
    options.columns = std::min<int>(size.ws_col, 100);
  return options;
}

ConsoleSink::ConsoleSink(const ConsoleOptions& options, std::FILE* out)
    : options_(options), out_(out) {
  if (options_.is_terminal) set_before_log(clear_progress);
}

ConsoleSink::~ConsoleSink() { finish(); }  // also where an error ends the run

void ConsoleSink::finish() {
  clear_progress();
  if (options_.is_terminal) set_before_log(nullptr);
}

std::string ConsoleSink::line_of(const StepRecord& r) const {
  const std::string speed = with_commas(std::llround(r.tokens_per_second()));
  std::vector<Field> fields{
      {formatted("step: %4lld", static_cast<long long>(r.step)), 31, 0},
      {formatted("loss: %8.5f", r.loss), 32, 1},
      {formatted("grad_norm: %7.4f", r.grad_norm), 33, 3},
      {formatted("memory: %5.2fGiB", r.memory_gib), 36, 5},
      {"tps: " + speed, 34, 2},
      {r.peak_tflops > 0 ? formatted("tflops: %.1f (%.1f %%)", r.tflops(), 100 * r.peak_fraction())
                         : formatted("tflops: %.3f", r.tflops()),
       36, 6}};
  if (r.trained_share() < kFewTrained)
    fields.push_back({formatted("trained: %.0f %%", 100 * r.trained_share()), 32, 4});
  if (!r.experts.entropy.empty()) {
    fields.push_back({formatted("load: %.2f", r.experts.max_over_mean), 35, 4});
    if (r.experts.num_idle > 0)
      fields.push_back(
          {formatted("idle: %lld", static_cast<long long>(r.experts.num_idle)), 31, 2});
  }
  return joined(std::move(fields), options_);
}

std::string ConsoleSink::progress_of(const StepRecord& r) {
  constexpr double kWeight = 0.1;
  const double took = last_time_ > 0 && r.time > last_time_ ? r.time - last_time_ : r.seconds;
  mean_seconds_ = mean_seconds_ > 0 ? mean_seconds_ + kWeight * (took - mean_seconds_) : took;
  const double left = mean_seconds_ * static_cast<double>(options_.num_steps - r.step);
  const double done = static_cast<double>(r.step) / static_cast<double>(options_.num_steps);
  constexpr int kBar = 20;
  const auto full = static_cast<std::size_t>(done * kBar);
  return joined({{formatted("%lld / %lld", static_cast<long long>(r.step),
                            static_cast<long long>(options_.num_steps)),
                  31, 0},
                 {"[" + std::string(full, '#') + std::string(kBar - full, '.') + "]", 0, 5},
                 {formatted("%3.0f %%", 100 * done), 0, 4},
                 {formatted("loss %.4f", r.loss), 32, 1},
                 {"tps " + with_commas(std::llround(r.tokens_per_second())), 34, 3},
                 {"left " + duration(left), 36, 2}},
                options_);
}

void ConsoleSink::write(const StepRecord& r) {
  const bool is_logged = r.step == options_.first_step + 1 || r.step % options_.log_freq == 0 ||
                         r.step == options_.num_steps || r.skipped || !r.validation.empty();
  const std::string progress = progress_of(r);
  last_time_ = r.time;
  if (!is_logged && !options_.is_terminal) return;
  clear_progress();
  if (!is_logged) {
    std::fprintf(out_, "%s%s", kClearLine, progress.c_str());
    progress_on = out_;
  } else {
    std::fprintf(out_, "%s\n", line_of(r).c_str());
    if (r.skipped)
      std::fputs("      skipped: a gradient is not finite, or no token counts\n", out_);
    for (const ValidationLoss& v : r.validation) {
      std::fprintf(out_, "      validation on %s: loss %.5f, perplexity %.4g\n",
                   printable(v.name).c_str(), v.loss, v.perplexity());
      for (std::size_t k = 0; k < v.mtp.size(); ++k)
        std::fprintf(out_, "        %zu tokens ahead: loss %.5f, accepted %.1f %%\n", k + 2,
                     v.mtp[k].loss, 100 * v.mtp[k].acceptance);
    }
  }
  std::fflush(out_);
}

std::string run_header(const config::Config& config, const RunFacts& facts,
                       const std::string& data) {
  const MeshShape shape = mesh_shape(config).validated();
  const auto view = [&](std::initializer_list<std::pair<const char*, int>> axes) {
    std::string text;
    for (const auto& [name, size] : axes)
      if (size > 1) text += detail::concat(text.empty() ? "" : " ", name, "=", size);
    return text.empty() ? std::string("1 rank") : text;
  };
  const data::SampleOrder order = sample_order(config);
  const auto s = [](std::int64_t n, const char* ending = "s") { return n == 1 ? "" : ending; };
  std::string text =
      detail::concat(config::model_title(config), ": ", with_commas(facts.num_parameters),
                     " parameters, ", with_commas(facts.num_active_parameters), " active, ",
                     config.training.dtype, " on ", config.training.device, "\n");
  if (facts.num_trained_parameters)
    text += detail::concat("trains ", with_commas(*facts.num_trained_parameters), " of ",
                           with_commas(facts.num_parameters), " parameters: ", trained_text(config),
                           "\n");
  text += detail::concat("on ", facts.num_ranks, " rank", s(facts.num_ranks));
  if (facts.num_ranks > 1)
    text += detail::concat(", in two views\n  dense:  ",
                           view({{"pp", shape.pp},
                                 {"dp_replicate", shape.dp_replicate},
                                 {"dp_shard", shape.dp_shard},
                                 {"cp", shape.cp},
                                 {"tp", shape.tp}}),
                           "\n  sparse: ",
                           view({{"pp", shape.pp},
                                 {"dp_replicate", shape.dp_replicate},
                                 {"efsdp", shape.efsdp},
                                 {"ep", shape.ep},
                                 {"etp", shape.etp}}));
  if (shape.pp > 1)
    text += detail::concat("\npipeline: ", config.parallelism.pipeline_parallel_schedule,
                           ", layers of the stages ", pipeline::plan_text(stage_plan(config)));
  text +=
      detail::concat("\ndata: ", for_terminal(data), "\na step of ", order.num_per_step(),
                     " sequences: ", order.num_micro, " micro-batch", s(order.num_micro, "es"),
                     " of ", order.batch, " on each of ", order.num_dp, " dp rank", s(order.num_dp),
                     "\n      ", with_commas(config.data.sequence_length), " tokens each, ",
                     with_commas(order.num_per_step() * config.data.sequence_length), " in all\n");
  if (facts.estimated_memory)
    text += detail::concat("memory of a rank: ", size_text(*facts.estimated_memory),
                           ", as estimated\n");
  if (facts.first_step >= config.training.steps) return text;  // a resumed run with nothing to do
  text += detail::concat("steps ", facts.first_step + 1, " to ", config.training.steps);
  if (!config.metrics.folder.empty())
    text += detail::concat(", metrics in ", printable(config.metrics.folder));
  return text + "\n";
}

}  // namespace moesh::train
