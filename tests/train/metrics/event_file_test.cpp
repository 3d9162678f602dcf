#include "moesh/train/metrics/sink.h"

#include <gtest/gtest.h>

#include "tests/support.h"

namespace moesh::train::event_file {
namespace {

// RFC 3720, B.4, and the usual check value.
TEST(EventFile, HasTheChecksumOfCastagnoli) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(masked(0), 0xA282EAD8u);
}

// The first record that TensorFlow itself writes, but for its time.
TEST(EventFile, BeginsAsTensorFlowsDo) {
  const std::string first = record(version_event(0));
  EXPECT_EQ(first.substr(0, 8), std::string("\x1a\0\0\0\0\0\0\0", 8));
  // wall_time, step, and the version with its length.
  const std::string data = first.substr(12, 26);
  EXPECT_EQ(data.substr(0, 13), std::string("\x09\0\0\0\0\0\0\0\0\x10\0\x1a\x0d", 13));
  EXPECT_EQ(data.substr(13), "brain.Event:2");
  EXPECT_EQ(first.size(), 8u + 4 + 26 + 4);
}

TEST(Scalars, HaveTheTagsOfTorchtitan) {
  const StepRecord r{.seconds = 0.5,
                     .loss = 2,
                     .auxiliary = {0.25, 0},
                     .num_tokens = 100,
                     .num_tokens_all = 300,
                     .flops_per_token = 1e10,
                     .peak_tflops = 8,
                     .sections = {.seconds = {0.125}},
                     .experts = {.entropy = {1.5}},
                     .bias = {{-0.5, 0.25}},
                     .validation = {{.name = "held", .loss = 3}}};
  std::map<std::string, double> found;
  for (const auto& [tag, value] : scalars_of(r))
    EXPECT_TRUE(found.emplace(tag, value).second) << tag << " comes twice";
  const std::map<std::string, double> expected{{"loss_metrics/global_avg_loss", 2},
                                               {"throughput(tps)", 200},
                                               {"tflops", 2},
                                               {"mfu(%)", 25},
                                               {"n_tokens_seen", 300},
                                               {"grad_norm", 0},
                                               {"lr", 0},
                                               {"memory/max_active(GiB)", 0},
                                               {"time_metrics/end_to_end(s)", 0.5},
                                               {"time_metrics/data_loading(s)", 0.125},
                                               {"time_metrics/data_loading(%)", 25},
                                               {"loss_metrics/balance_loss", 0.25},
                                               {"experts/entropy/layer_0", 1.5},
                                               {"experts/bias_range/layer_0", 0.75},
                                               {"validation_metrics/loss/held", 3}};
  for (const auto& [tag, value] : expected) {
    ASSERT_TRUE(found.contains(tag)) << tag;
    EXPECT_DOUBLE_EQ(found[tag], value) << tag;
  }
  EXPECT_FALSE(found.contains("loss_metrics/z_loss")) << "its weight is 0";
}

}  // namespace
}  // namespace moesh::train::event_file
