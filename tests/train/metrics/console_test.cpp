#include "moesh/train/metrics/sink.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "moesh/base/log.h"
#include "moesh/config/merge.h"

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

StepRecord console_record(std::int64_t step) {
  return {.step = step,
          .time = 1000.0 + 2 * static_cast<double>(step),
          .seconds = 0.0625,
          .loss = 4.5812345,
          .grad_norm = 0.98765,
          .num_tokens = 1024,
          .flops_per_token = 2e7,
          .memory_gib = 0.5,
          .experts = {.max_over_mean = 1.756, .num_idle = 3, .entropy = {1}}};
}

std::string line(std::int64_t step) {
  return "step: " + std::string(step < 10 ? "   " : "  ") + std::to_string(step) +
         "  loss:  4.58123  grad_norm:  0.9877  memory:  0.50GiB  tps: 16,384  load: 1.76  idle: 3\n";
}

TEST(Console, HasTheFirstTheLastAndEveryFewSteps) {
  std::vector<StepRecord> records;
  for (std::int64_t step = 1; step <= 8; ++step) records.push_back(console_record(step));
  EXPECT_EQ(printed({.num_steps = 8, .log_freq = 3}, records),
            line(1) + line(3) + line(6) + line(8));
  records.erase(records.begin(), records.begin() + 3);
  EXPECT_EQ(printed({.num_steps = 8, .first_step = 3, .log_freq = 100}, records), line(4) + line(8))
      << "the first step of a run that goes on is its first, too";
}

TEST(Console, SaysHowFewTokensAreTrainedOn) {
  StepRecord few = console_record(1), many = console_record(1);
  few.num_read = 4 * few.num_tokens;
  many.num_read = many.num_tokens + 10;
  const std::string with_few = printed({.num_steps = 1}, {few});
  EXPECT_NE(with_few.find("  trained: 25 %  "), std::string::npos) << with_few;
  EXPECT_EQ(printed({.num_steps = 1}, {many}), line(1));
}

TEST(Console, HasEverySkippedStep) {
  StepRecord skipped = console_record(2);
  skipped.skipped = true;
  EXPECT_EQ(printed({.num_steps = 99, .log_freq = 50}, {skipped}),
            line(2) + "      skipped: a gradient is not finite, or no token counts\n");
}

// Whatever the numbers are.
TEST(Console, LinesFitTheirColumns) {
  StepRecord large = console_record(1234567);
  large.loss = 12345.678, large.grad_norm = 1e9, large.memory_gib = 1234.5;
  large.seconds = 1e-5, large.peak_tflops = 1e6, large.experts.num_idle = 123456;
  for (const int columns : {40, 80, 100}) {
    std::size_t num_fields[2], i = 0;
    for (const StepRecord& r : {console_record(7), large}) {
      const std::string text = printed({.num_steps = 9999999, .columns = columns}, {r});
      EXPECT_LE(text.size() - 1, static_cast<std::size_t>(columns)) << text;
      EXPECT_EQ(text.find("step: "), 0u);
      EXPECT_NE(text.find("loss: "), std::string::npos) << text;
      num_fields[i++] = static_cast<std::size_t>(std::count(text.begin(), text.end(), ':'));
    }
    if (columns == 80) {
      EXPECT_GE(num_fields[0], 5u);
    }
    if (columns == 100) {
      EXPECT_GE(num_fields[0], 7u);
    }
  }
}

TEST(Console, ColoursDoNotChangeWhatIsSaid) {
  const std::string plain = printed({.num_steps = 20, .columns = 80}, {console_record(1)});
  const std::string colored =
      printed({.num_steps = 20, .has_colors = true, .columns = 80}, {console_record(1)});
  EXPECT_NE(colored.find("\033[32m"), std::string::npos);
  EXPECT_EQ(std::regex_replace(colored, std::regex("\033\\[[0-9]*m"), ""), plain);
}

TEST(Console, ShowsProgressOnATerminalAndClearsIt) {
  const std::string clear = "\r\033[K";
  EXPECT_EQ(printed({.num_steps = 20, .log_freq = 3, .is_terminal = true},
                    {console_record(1), console_record(2), console_record(3), console_record(4)}),
            line(1) + clear +
                "2 / 20  [##..................]   10 %  loss 4.5812  tps 16,384  left 0:00:05" +
                clear + line(3) + clear +
                "4 / 20  [####................]   20 %  loss 4.5812  tps 16,384  left 0:00:09" +
                clear)
      << "steps end two seconds apart, which the mean of the time left follows";
}

TEST(Console, AProgressLineGoesBeforeAWarning) {
  std::FILE* out = std::tmpfile();
  ConsoleSink sink({.num_steps = 20, .log_freq = 30, .is_terminal = true}, out);
  sink.write(console_record(2));
  log_warn("of something");
  std::string text(static_cast<std::size_t>(std::ftell(out)), '\0');
  std::rewind(out);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), out), text.size());
  EXPECT_TRUE(text.ends_with("\r\033[K")) << text;
}

TEST(Console, TheHeaderSaysWhatIsAboutToHappen) {
  const auto config = config::load_config(
      {"--mesh=dp_shard=2,cp=2,tp=2,ep=2,etp=2", "--training.steps=300", "--metrics.folder=out"});
  const std::string header = run_header(config,
                                        {.num_ranks = 8,
                                         .num_parameters = 71860,
                                         .num_active_parameters = 44212,
                                         .estimated_memory = 3 << 20},
                                        "a synthetic language");
  for (const char* part :
       {"deepseek_v3 tiny: 71,860 parameters, 44,212 active, float32 on cpu\n",
        "  dense:  dp_shard=2 cp=2 tp=2\n", "  sparse: efsdp=2 ep=2 etp=2\n",
        "data: a synthetic language\n",
        "a step of 4 sequences: 1 micro-batch of 2 on each of 2 dp ranks\n",
        "64 tokens each, 256 in all\n", "memory of a rank: 3.00 MiB, as estimated\n",
        "steps 1 to 300, metrics in out\n"})
    EXPECT_NE(header.find(part), std::string::npos) << part << "is not in\n" << header;
  // Several sources have a line each, and a run that is over has no steps.
  const std::string over = run_header(config, {.first_step = 300}, "2 sources\n  a\n  b");
  EXPECT_NE(over.find("data: 2 sources\n  a\n  b\n"), std::string::npos) << over;
  EXPECT_EQ(over.find("steps "), std::string::npos) << over;
  std::istringstream lines(header);
  for (std::string text; std::getline(lines, text);) EXPECT_LE(text.size(), 100u) << text;
}

TEST(Console, TheHeaderSaysWhatIsTrainedIfNotAll) {
  const auto header = [](const std::vector<std::string>& args,
                         std::optional<std::int64_t> num_trained) {
    return run_header(config::load_config(args),
                      {.num_parameters = 508800, .num_trained_parameters = num_trained}, "data");
  };
  EXPECT_EQ(header({}, {}).find("trains"), std::string::npos);
  for (const auto& [args, text] : std::map<std::vector<std::string>, std::string>{
           {{"--lora.rank=4"}, "LoRA of rank 4\n"},
           {{"--lora.rank=4", "--lora.rank_pattern=o_proj=2"}, "LoRA of ranks 2 to 4\n"},
           {{"--training.freeze=*norm*"}, "training.freeze matches the others\n"}})
    EXPECT_NE(header(args, 24064).find("\ntrains 24,064 of 508,800 parameters: " + text),
              std::string::npos)
        << text;
}

}  // namespace
}  // namespace moesh::train
