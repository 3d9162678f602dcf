#include "moesh/train/metrics/console.h"

#include <gtest/gtest.h>

#include <string>

namespace moesh::train {
namespace {

// What the sink prints for these records.
std::string printed(const ConsoleOptions& options, const std::vector<StepRecord>& records) {
  std::FILE* out = std::tmpfile();
  {
    ConsoleSink sink(options, out);
    for (const auto& r : records) sink.write(r);
    sink.finish();
  }
  std::string text(static_cast<std::size_t>(std::ftell(out)), '\0');
  std::rewind(out);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), out), text.size());
  std::fclose(out);
  return text;
}

StepRecord record(std::int64_t step) {
  return {.step = step,
          .seconds = 0.0625,
          .loss = 4.5812345,
          .grad_norm = 0.98765,
          .num_tokens = 1024,
          .flops_per_token = 2e7,
          .memory_gib = 0.5,
          .experts = {.max_over_mean = 1.756, .num_idle = 3}};
}

std::string line(std::int64_t step) {
  return "step: " + std::string(step < 10 ? "   " : "  ") + std::to_string(step) +
         "  loss:  4.58123  grad_norm:   0.9877  memory:  0.50GiB  tps: 16,384  tflops: 0.328  "
         "experts: max/mean 1.76, 3 idle\n";
}

TEST(Console, HasTheFirstTheLastAndEveryFewSteps) {
  std::vector<StepRecord> records;
  for (std::int64_t step = 1; step <= 8; ++step) records.push_back(record(step));
  EXPECT_EQ(printed({.num_steps = 8, .log_freq = 3}, records),
            line(1) + line(3) + line(6) + line(8));
}

TEST(Console, HasEverySkippedStep) {
  StepRecord skipped = record(2);
  skipped.skipped = true;
  std::string expected = line(2);
  expected.insert(expected.size() - 1, "  (skipped: a gradient is not finite, or no token counts)");
  EXPECT_EQ(printed({.num_steps = 99, .log_freq = 50}, {skipped}), expected);
}

TEST(Console, ShowsProgressOnATerminalAndClearsIt) {
  const std::string clear = "\r\033[K";
  EXPECT_EQ(printed({.num_steps = 20, .log_freq = 3, .is_terminal = true},
                    {record(1), record(2), record(3), record(4)}),
            line(1) + clear + "2 / 20  loss 4.5812" + clear + line(3) + clear +
                "4 / 20  loss 4.5812" + clear);
}

}  // namespace
}  // namespace moesh::train
