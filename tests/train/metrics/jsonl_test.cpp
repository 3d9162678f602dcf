#include "moesh/train/metrics/jsonl.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "moesh/formats/json.h"
#include "tests/support.h"

namespace moesh::train {
namespace {

std::string read(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

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
Values values_of(const std::string& line) {
  Values values;
  const formats::JsonValue object = formats::parse_json(line, "line");
  for (auto [key, value] : object.as_object("line")) {
    if (const auto* whole = std::get_if<std::int64_t>(&value.value))
      value.value = static_cast<double>(*whole);
    values.emplace_back(key, value);
  }
  return values;
}

StepRecord record(std::int64_t step) {
  return {.step = step,
          .seconds = 0.0123456789,
          .loss = 4.564348191467837,
          .total_loss = 4.6,
          .grad_norm = 0.1,
          .lr = 8e-4 / 3,
          .num_tokens = 128,
          .flops_per_token = 123456.789,
          .memory_gib = 0.2345678,
          .experts = {.max_over_mean = 1.96875, .num_idle = 2},
          .skipped = step == 3};
}

// Printed for these records by the writer that this sink replaced, which used printf.
const char* const kRecorded[] = {
    R"({"step":1,"loss":4.564348191467837,"total_loss":4.5999999999999996,"grad_norm":0.10000000000000001,"lr":0.000266666667,"seconds":0.0123457,"tps":10368,"tflops":0.00128,"memory_gib":0.2346,"expert_max_over_mean":1.96875,"experts_idle":2,"tokens":128,"skipped":false})",
    R"({"step":3,"loss":null,"total_loss":4.5999999999999996,"grad_norm":null,"lr":0.000266666667,"seconds":0.0123457,"tps":10368,"tflops":0.00128,"memory_gib":0.2346,"expert_max_over_mean":1.96875,"experts_idle":2,"tokens":128,"skipped":true})"};

TEST(Jsonl, HasTheKeysAndValuesOfARecordedRun) {
  const Folder folder("");
  JsonlSink sink(folder.path(), 0);
  sink.write(record(1));
  StepRecord bad = record(3);
  bad.loss = std::nan(""), bad.grad_norm = std::numeric_limits<double>::infinity();
  sink.write(bad);
  std::istringstream lines(folder.text());  // each is there before finish
  sink.finish();
  for (const char* recorded : kRecorded) {
    std::string line;
    ASSERT_TRUE(std::getline(lines, line));
    EXPECT_EQ(values_of(line), values_of(recorded)) << line;
  }
  EXPECT_EQ(lines.peek(), EOF);
}

TEST(Jsonl, KeepsTheStepsThatARunGoesOnFrom) {
  const std::string before = "{\"step\":1,\"loss\":5}\n{\"step\":2,\"loss\":4}\n";
  const Folder folder(before + "{\"step\":3,\"loss\":3}\n{\"step\":2,\"lo");
  {
    JsonlSink sink(folder.path(), 2);
    EXPECT_EQ(folder.text(), before);
    sink.write(record(3));
  }
  EXPECT_EQ(folder.text().find(before + "{\"step\":3,\"loss\":4.56"), 0u) << folder.text();
  JsonlSink anew(folder.path(), 0);
  EXPECT_EQ(folder.text(), "");
}

TEST(Jsonl, MakesTheFolderOrSaysThatItCannot) {
  const Folder folder("");
  JsonlSink(folder.path() / "a" / "b", 0).write(record(1));
  EXPECT_NE(read(folder.path() / "a" / "b" / "metrics.jsonl"), "");
  expect_parts(
      error_of([&] { JsonlSink(folder.path() / "metrics.jsonl" / "c", 0); }, ErrorKind::storage),
      {"metrics.folder = '", "cannot be written"});
}

}  // namespace
}  // namespace moesh::train
