#include "moesh/train/metrics/sink.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "moesh/base/version.h"
#include "moesh/config/merge.h"
#include "moesh/formats/json.h"
#include "moesh/train/metrics/run_folder.h"
#include "tests/support.h"
#include "tests/train/metrics/support.h"

namespace moesh::train {
namespace {

// A folder of its own, with a metrics.jsonl of this text.
class Folder {
 public:
  explicit Folder(const std::string& text) : file_("metrics.jsonl", text) {}
  std::filesystem::path path() const { return std::filesystem::path(file_.path()).parent_path(); }
  std::string text() const { return read(file_.path()); }

 private:
  TemporaryFile file_;
};

// Every key with its value, in the order of the line. Whole numbers are numbers: 12 is 12.0.
using Values = std::vector<std::pair<std::string, formats::JsonValue>>;
formats::JsonValue as_numbers(formats::JsonValue value) {
  if (const auto* whole = std::get_if<std::int64_t>(&value.value))
    value.value = static_cast<double>(*whole);
  if (auto* list = std::get_if<formats::JsonList>(&value.value))
    for (auto& v : *list) v = as_numbers(v);
  if (auto* object = std::get_if<formats::JsonObject>(&value.value))
    for (auto& [key, v] : *object) v = as_numbers(v);
  return value;
}
Values values_of(const std::string& line) {
  Values values;
  const formats::JsonValue object = formats::parse_json(line, "line");
  for (const auto& [key, value] : object.as_object("line"))
    values.emplace_back(key, as_numbers(value));
  return values;
}

StepRecord jsonl_record(std::int64_t step) {
  return {.step = step,
          .time = 1.7e9 + 0.125,
          .seconds = 0.0123456789,
          .loss = 4.564348191467837,
          .total_loss = 4.6,
          .auxiliary = {0.03, 0.005},
          .grad_norm = 0.1,
          .lr = 8e-4 / 3,
          .num_tokens = 128,
          .num_read = 512,
          .num_tokens_all = 128 * step,
          .flops_per_token = 123456.789,
          .peak_tflops = 0.00256,
          .memory_gib = 0.2345678,
          .sections = {.seconds = {0.001, 0.004, 0.005, 0, 0.002, 0, 0.0003, 0, 0.5}},
          .sent = {{"tp", 640}, {"dp_shard|cp", 1280}},
          .experts = {.max_over_mean = 1.96875, .num_idle = 2, .entropy = {0.5, 0.25}},
          .bias = {{-0.001, 0.002}, {0, 0}},
          .counts_E = step == 1 ? std::vector<at::Tensor>{at::tensor({7, 0}, at::kLong),
                                                          at::tensor({3, 4}, at::kLong)}
                                : std::vector<at::Tensor>{},
          .float8 = step == 1 ? float8_shares(at::tensor({8, 2, 4, 0, 0, 0, 16, 1, 0,  // layer 0
                                                          0, 0, 0, 0, 0, 0, 0,  0, 0,  //
                                                          0, 0, 0, 0, 0, 0, 0,  0, 0,  // layer 1
                                                          0, 0, 0, 4, 1, 3, 0,  0, 0},
                                                         at::kLong)
                                                  .view({2, 2, 3, 3}))
                              : std::vector<Float8Share>{},
          .skipped = step == 3};
}

// What a line says, by hand.
const char* const kExpected[] = {
    R"({"step":1,"time":1700000000.125,"loss":4.564348191467837,"total_loss":4.5999999999999996,"grad_norm":0.10000000000000001,"lr":0.000266666667,"seconds":0.0123457,"tps":10368,"tflops":0.00128,"memory_gib":0.2346,"expert_max_over_mean":1.96875,"experts_idle":2,"tokens":128,"tokens_total":128,"trained_share":0.25,"skipped":false,"balance_loss":0.03,"z_loss":0.005,"peak_fraction":0.5,"sections":{"data":0.001,"forward":0.004,"backward":0.005,"reduce":0,"update":0.002,"waiting":0,"other":0.0003,"saving":0.5},"sent":{"dp_shard|cp":1280,"tp":640},"expert_entropy":[0.5,0.25],"expert_bias":[[-0.001,0.002],[0,0]],"expert_counts":[[7,0],[3,4]],"float8":{"experts":{"activations":{"zeros":[0.25,null],"largest":[0.5,null]},"weights":{"zeros":[0.0625,null],"largest":[0,null]}},"dense":{"gradients":{"zeros":[null,0.25],"largest":[null,0.75]}}}})",
    R"({"step":3,"time":1700000000.125,"loss":null,"total_loss":4.5999999999999996,"grad_norm":null,"lr":0.000266666667,"seconds":0.0123457,"tps":10368,"tflops":0.00128,"memory_gib":0.2346,"expert_max_over_mean":1.96875,"experts_idle":2,"tokens":128,"tokens_total":384,"trained_share":0.25,"skipped":true,"balance_loss":0.03,"z_loss":0.005,"peak_fraction":0.5,"sections":{"data":0.001,"forward":0.004,"backward":0.005,"reduce":0,"update":0.002,"waiting":0,"other":0.0003,"saving":0.5},"sent":{"dp_shard|cp":1280,"tp":640},"expert_entropy":[0.5,0.25],"expert_bias":[[-0.001,0.002],[0,0]]})"};

TEST(Jsonl, HasEveryPartOfARecord) {
  const Folder folder("");
  JsonlSink sink(folder.path(), 0);
  sink.write(jsonl_record(1));
  StepRecord bad = jsonl_record(3);
  bad.loss = std::nan(""), bad.grad_norm = std::numeric_limits<double>::infinity();
  sink.write(bad);
  std::istringstream lines(folder.text());  // each is there before finish
  sink.finish();
  for (const char* expected : kExpected) {
    std::string line;
    ASSERT_TRUE(std::getline(lines, line));
    EXPECT_EQ(values_of(line), values_of(expected)) << line;
  }
  EXPECT_EQ(lines.peek(), EOF);
}

TEST(Jsonl, KeepsTheStepsThatARunGoesOnFrom) {
  const std::string before = "{\"step\":1,\"loss\":5}\n{\"step\":2,\"loss\":4}\n";
  const Folder folder(before + "{\"step\":3,\"loss\":3}\n{\"step\":2,\"lo");
  {
    JsonlSink sink(folder.path(), 2);
    EXPECT_EQ(folder.text(), before);
    sink.write(jsonl_record(3));
  }
  EXPECT_EQ(folder.text().find(before + "{\"step\":3,\"time\":"), 0u) << folder.text();
  EXPECT_EQ(read(folder.path() / "replaced.jsonl"), "{\"step\":3,\"loss\":3}\n{\"step\":2,\"lo\n");
}

TEST(RunFolder, NothingIsTruncatedByARunThatBegins) {
  const std::string first = "{\"step\":1,\"loss\":5}\n";
  const Folder folder(first);
  std::ofstream(folder.path() / "config.toml") << "first";
  std::ofstream(folder.path() / "unrelated.txt") << "stays";
  std::filesystem::create_directories(folder.path() / "tensorboard");
  std::ofstream(folder.path() / "tensorboard" / "events") << "events";
  const auto earlier = folder.path() / "earlier";
  std::string second;
  {
    JsonlSink sink(folder.path(), 0);
    EXPECT_EQ(folder.text(), "");
    sink.write(jsonl_record(1));
    second = folder.text();
  }
  EXPECT_EQ(read(earlier / "0001" / "metrics.jsonl"), first);
  EXPECT_EQ(read(earlier / "0001" / "config.toml"), "first");
  EXPECT_EQ(read(earlier / "0001" / "tensorboard" / "events"), "events");
  EXPECT_EQ(read(folder.path() / "unrelated.txt"), "stays");
  {
    JsonlSink third(folder.path(), 0);
  }
  EXPECT_EQ(read(earlier / "0002" / "metrics.jsonl"), second);
  EXPECT_EQ(read(earlier / "0001" / "metrics.jsonl"), first);
  {
    JsonlSink fourth(folder.path(), 0);
  }
  EXPECT_FALSE(std::filesystem::exists(earlier / "0003")) << "a run without a step left nothing";
}

// Killed between two moves: the next start goes on with the same folder.
TEST(RunFolder, WhatWasMovedInPartIsMovedWhole) {
  const Folder folder("line\n");
  const auto target = folder.path() / "earlier" / "0001";
  std::filesystem::create_directories(target);
  std::ofstream(target / "config.toml") << "moved before the kill";
  {
    JsonlSink sink(folder.path(), 0);
  }
  EXPECT_EQ(read(target / "config.toml"), "moved before the kill");
  EXPECT_EQ(read(target / "metrics.jsonl"), "line\n");
}

config::Config config_in(const std::filesystem::path& folder) {
  return config::load_config({"--mesh=dp_shard=2,tp=2,ep=4", "--metrics.enable_csv", "--quiet",
                              "--metrics.enable_tensorboard", "--training.steps=7",
                              "--metrics.folder=" + folder.string()});
}

TEST(RunFolder, SaysWhatWasStartedWhereAndWithWhat) {
  const Folder folder("");
  const config::Config config = config_in(folder.path());
  const RunFacts facts{.num_ranks = 4, .num_parameters = 71860, .estimated_memory = 123456};
  {
    const auto sinks = open_sinks(config, facts);
  }
  EXPECT_EQ(read(folder.path() / "config.toml"), print_config(config));
  {
    RunFacts again = facts;
    again.first_step = 3;
    const auto sinks = open_sinks(config, again);
  }
  std::istringstream lines(read(folder.path() / "starts.jsonl"));
  std::vector<formats::JsonValue> starts;
  for (std::string line; std::getline(lines, line);)
    starts.push_back(formats::parse_json(line, "start"));
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_EQ(starts[0].at("first_step", "").as_int(""), 0);
  EXPECT_EQ(starts[1].at("first_step", "").as_int(""), 3);
  const auto& start = starts[0];
  EXPECT_EQ(start.at("config", "").as_text(""), print_config(config));
  EXPECT_EQ(start.at("mesh", "").at("tp", "").as_int(""), 2);
  EXPECT_EQ(start.at("mesh", "").at("ep", "").as_int(""), 4);
  EXPECT_EQ(start.at("mesh", "").at("efsdp", "").as_int(""), 1);
  EXPECT_EQ(start.at("moesh", "").as_text(""), version());
  EXPECT_EQ(start.at("torch", "").as_text(""), torch_version());
  EXPECT_FALSE(start.at("host", "").as_text("").empty());
  EXPECT_GT(start.at("time", "").as_number(""), 1.7e9);
  EXPECT_EQ(start.at("estimated_memory", "").as_int(""), 123456);
}

TEST(RunFolder, HasTheFilesThatAreAskedFor) {
  const Folder folder("");
  {
    const auto sinks = open_sinks(config_in(folder.path()), {});
  }
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "metrics.csv"));
  EXPECT_FALSE(std::filesystem::is_empty(folder.path() / "tensorboard"));
  const Folder plain("");
  {
    const auto sinks = open_sinks(
        config::load_config({"--quiet", "--metrics.folder=" + plain.path().string()}), {});
    EXPECT_EQ(sinks.size(), 1u);
  }
  EXPECT_FALSE(std::filesystem::exists(plain.path() / "metrics.csv"));
}

TEST(Jsonl, MakesTheFolderOrSaysThatItCannot) {
  const Folder folder("");
  JsonlSink(folder.path() / "a" / "b", 0).write(jsonl_record(1));
  EXPECT_NE(read(folder.path() / "a" / "b" / "metrics.jsonl"), "");
  expect_parts(
      error_of([&] { JsonlSink(folder.path() / "metrics.jsonl" / "c", 0); }, ErrorKind::storage),
      {"metrics.folder = '", "cannot be written"});
}

}  // namespace
}  // namespace moesh::train
