#include "moesh/train/metrics/console.h"

#include <cmath>

#include "moesh/base/text.h"
#include "moesh/formats/name.h"

namespace moesh::train {
namespace {

constexpr const char* kClearLine = "\r\033[K";

}  // namespace

ConsoleSink::ConsoleSink(const ConsoleOptions& options, std::FILE* out)
    : options_(options), out_(out) {}

ConsoleSink::~ConsoleSink() { clear_progress(); }  // also where an error ends the run

void ConsoleSink::clear_progress() {
  if (has_progress_) std::fputs(kClearLine, out_);
  has_progress_ = false;
}

void ConsoleSink::write(const StepRecord& r) {
  const bool is_logged = r.step == 1 || r.step % options_.log_freq == 0 ||
                         r.step == options_.num_steps || r.skipped || !r.validation.empty();
  if (!is_logged && !options_.is_terminal) return;
  if (!is_logged) {
    std::fprintf(out_, "%s%lld / %lld  loss %.4f", kClearLine, static_cast<long long>(r.step),
                 static_cast<long long>(options_.num_steps), r.loss);
    has_progress_ = true;
  } else {
    clear_progress();
    std::fprintf(
        out_,
        "step: %4lld  loss: %8.5f  grad_norm: %8.4f  memory: %5.2fGiB  tps: %s  tflops: %.3f  "
        "experts: max/mean %.2f, %lld idle%s\n",
        static_cast<long long>(r.step), r.loss, r.grad_norm, r.memory_gib,
        with_commas(std::llround(r.tokens_per_second())).c_str(), r.tflops(),
        r.experts.max_over_mean, static_cast<long long>(r.experts.num_idle),
        r.skipped ? "  (skipped: a gradient is not finite, or no token counts)" : "");
    for (const ValidationLoss& v : r.validation)
      std::fprintf(out_, "      validation on %s: loss %.5f, perplexity %.4g\n",
                   formats::printable(v.name).c_str(), v.loss, v.perplexity());
  }
  std::fflush(out_);
}

}  // namespace moesh::train
