#include "moesh/train/metrics/sink.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>

#include "moesh/checkpoint/file.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"

namespace moesh::train {
namespace {

constexpr std::uint64_t kMaxCsvBytes = std::uint64_t{1} << 33;

// RFC 4180.
std::string quoted(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

// As short as it can be read back; nothing where it is not finite.
std::string text_of(double x) {
  if (!std::isfinite(x)) return "";
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};
}

using CsvRow = std::vector<std::pair<std::string, std::string>>;

CsvRow row_of(const StepRecord& r, const std::vector<std::string>& validation_names) {
  CsvRow row{{"step", std::to_string(r.step)},
             {"time", text_of(r.time)},
             {"tokens", std::to_string(r.num_tokens)},
             {"tokens_total", std::to_string(r.num_tokens_all)},
             {"loss", text_of(r.loss)},
             {"total_loss", text_of(r.total_loss)}};
  for (std::size_t i = 0; i < r.auxiliary.size(); ++i)
    row.emplace_back(kAuxiliaryNames[i], text_of(r.auxiliary[i]));
  row.insert(row.end(), {{"grad_norm", text_of(r.grad_norm)},
                         {"lr", text_of(r.lr)},
                         {"seconds", text_of(r.seconds)},
                         {"tps", text_of(r.tokens_per_second())},
                         {"tflops", text_of(r.tflops())},
                         {"peak_fraction", r.peak_tflops > 0 ? text_of(r.peak_fraction()) : ""},
                         {"memory_gib", text_of(r.memory_gib)}});
  for (std::size_t i = 0; i < kNumSections; ++i)
    row.emplace_back(std::string("seconds_") + to_string(static_cast<Section>(i)),
                     text_of(r.sections.seconds[i]));
  const auto sent =
      std::accumulate(r.sent.begin(), r.sent.end(), std::int64_t{0},
                      [](std::int64_t sum, const auto& entry) { return sum + entry.second; });
  const auto& entropy = r.experts.entropy;
  double least_bias = 0, largest_bias = 0;
  for (const BiasRange& b : r.bias)
    least_bias = std::min(least_bias, b.least), largest_bias = std::max(largest_bias, b.largest);
  row.insert(row.end(),
             {{"sent_bytes", std::to_string(sent)},
              {"expert_max_over_mean", text_of(r.experts.max_over_mean)},
              {"experts_idle", std::to_string(r.experts.num_idle)},
              {"expert_entropy_least",
               entropy.empty() ? "" : text_of(*std::min_element(entropy.begin(), entropy.end()))},
              {"expert_bias_least", text_of(least_bias)},
              {"expert_bias_largest", text_of(largest_bias)},
              {"skipped", r.skipped ? "1" : "0"}});
  for (const std::string& name : validation_names) {
    const auto found = std::find_if(r.validation.begin(), r.validation.end(),
                                    [&](const ValidationLoss& v) { return v.name == name; });
    row.emplace_back("validation " + name, found == r.validation.end() ? "" : text_of(found->loss));
  }
  return row;
}

std::string line_of(const CsvRow& row, bool is_header) {
  std::string line;
  for (const auto& [name, value] : row)
    line += (line.empty() ? "" : ",") + (is_header ? quoted(name) : value);
  return line + "\n";
}

// The header, and the rows of the first steps.
std::string kept_rows(const std::string& text, std::int64_t last_step) {
  std::istringstream lines(text);
  std::string kept, line;
  std::getline(lines, line);
  kept = line + "\n";
  while (std::getline(lines, line)) {
    std::int64_t step = 0;
    const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
    if (error == std::errc() && end != line.data() + line.size() && *end == ',' &&
        step <= last_step && !lines.eof())
      kept += line + "\n";
  }
  return kept;
}

AppendFile opened(const std::filesystem::path& path, std::int64_t first_step,
                  const std::string& header) {
  const std::string before =
      formats::exists(path) ? formats::InputFile(path).read_all(kMaxCsvBytes) : "";
  if (before.starts_with(header)) {
    if (const std::string kept = kept_rows(before, first_step); kept != before) {
      const auto beside = std::filesystem::path(path).concat(".new");
      formats::file_system().remove(beside);
      checkpoint::write_file(beside, kept);
      if (formats::file_system().rename(beside, path) != 0)
        formats::fail_at(path, "replace", errno);
    }
    return AppendFile(path);
  }
  if (!before.empty()) {
    const auto old =
        path.parent_path() / ("metrics-until-step-" + std::to_string(first_step) + ".csv");
    if (formats::file_system().rename(path, old) != 0) formats::fail_at(path, "move", errno);
  }
  AppendFile file(path);
  file.write(header, first_step);
  return file;
}

}  // namespace

CsvSink::CsvSink(const std::filesystem::path& folder, std::int64_t first_step,
                 std::vector<std::string> validation_names)
    : validation_names_(std::move(validation_names)),
      file_(opened(folder / "metrics.csv", first_step,
                   line_of(row_of({}, validation_names_), true))) {}

void CsvSink::write(const StepRecord& record) {
  file_.write_line(line_of(row_of(record, validation_names_), false), record.step);
}

}  // namespace moesh::train
