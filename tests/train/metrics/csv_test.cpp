#include "moesh/train/metrics/sink.h"

#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "tests/support.h"
#include "tests/train/metrics/support.h"

namespace moesh::train {
namespace {

StepRecord csv_record(std::int64_t step) {
  return {.step = step,
          .time = 1.7e9,
          .seconds = 0.5,
          .loss = 4.564348191467837,
          .auxiliary = {0.25, 0},
          .num_tokens = 100,
          .num_tokens_all = 100 * step,
          .sections = {.seconds = {0.125}},
          .sent = {{"tp", 640}, {"ep", 60}},
          .experts = {.max_over_mean = 2, .num_idle = 1, .entropy = {1.5, 0.5}},
          .bias = {{-0.5, 0.25}, {-0.125, 1}},
          .validation = {{.name = "held, \"out\"", .loss = 3}}};
}

// Without quotes in values: none of ours has any.
std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> values;
  std::istringstream in(line);
  for (std::string value; std::getline(in, value, ',');) values.push_back(value);
  return values;
}

TEST(Csv, HasTheNumbersUnderTheirNames) {
  const TemporaryFile file("metrics.csv", "");
  const auto folder = std::filesystem::path(file.path()).parent_path();
  {
    CsvSink sink(folder, 0, {"held, \"out\"", "web"});
    sink.write(csv_record(1));
    StepRecord second = csv_record(2);
    second.loss = std::nan(""), second.validation.clear();
    sink.write(second);
  }
  std::istringstream lines(read(file.path()));
  std::string header, one, two;
  std::getline(lines, header), std::getline(lines, one), std::getline(lines, two);
  const std::string last = "\"validation held, \"\"out\"\"\",validation web";
  ASSERT_TRUE(header.ends_with("," + last)) << header;
  auto names = cells(header.substr(0, header.size() - last.size() - 1));
  names.insert(names.end(), {"held", "web"});
  std::map<std::string, std::string> first, second;
  const auto values = cells(one + ",."), later = cells(two + ",.");  // the last one is empty
  ASSERT_EQ(values.size(), names.size() + 1);
  for (std::size_t i = 0; i < names.size(); ++i)
    first[names[i]] = values[i], second[names[i]] = later[i];
  EXPECT_EQ(first["step"], "1");
  EXPECT_EQ(first["loss"], "4.564348191467837");
  EXPECT_EQ(first["balance_loss"], "0.25");
  EXPECT_EQ(first["tokens_total"], "100");
  EXPECT_EQ(first["tps"], "200");
  EXPECT_EQ(first["seconds_data"], "0.125");
  EXPECT_EQ(first["sent_bytes"], "700");
  EXPECT_EQ(first["expert_entropy_least"], "0.5");
  EXPECT_EQ(first["expert_bias_least"], "-0.5");
  EXPECT_EQ(first["expert_bias_largest"], "1");
  EXPECT_EQ(first["held"], "3");
  EXPECT_EQ(first["web"], "");
  EXPECT_EQ(second["loss"], "") << "not a number";
  EXPECT_EQ(second["held"], "");
}

TEST(Csv, KeepsTheRowsThatARunGoesOnFrom) {
  const TemporaryFile file("metrics.csv", "");
  const auto folder = std::filesystem::path(file.path()).parent_path();
  std::string two_rows;
  {
    CsvSink sink(folder, 0, {});
    sink.write(csv_record(1)), sink.write(csv_record(2));
    two_rows = read(file.path());
    sink.write(csv_record(3));
  }
  std::ofstream(file.path(), std::ios::app) << "2,cut o";
  {
    CsvSink sink(folder, 2, {});
  }
  EXPECT_EQ(read(file.path()), two_rows);
  {
    CsvSink sink(folder, 2, {"another column"});
  }
  EXPECT_EQ(read(folder / "metrics-until-step-2.csv"), two_rows);
  EXPECT_NE(read(file.path()).find("validation another column\n"), std::string::npos);
}

}  // namespace
}  // namespace moesh::train
