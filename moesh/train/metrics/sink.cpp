#include "moesh/train/metrics/sink.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>

#include "moesh/formats/file.h"
#include "moesh/train/metrics/run_folder.h"

namespace moesh::train {

namespace {

using formats::JsonList;
using formats::JsonObject;
using formats::JsonValue;

// A measured number, rounded to what can mean something; 0: with all its digits. JSON has no
// infinity and no NaN: null.
JsonValue rounded(double x, int num_digits) {
  if (!std::isfinite(x)) return {nullptr};
  if (num_digits == 0) return {x};
  char text[40];
  const auto end =
      std::to_chars(text, text + sizeof text, x, std::chars_format::general, num_digits).ptr;
  std::from_chars(text, end, x);
  return {x};
}

JsonValue sections_of(const StepRecord& r) {
  JsonObject seconds;
  for (std::size_t i = 0; i < kNumSections; ++i) {
    const auto section = static_cast<Section>(i);
    if (is_in_step(section) || r.sections[section] > 0)
      seconds.emplace_back(to_string(section), rounded(r.sections[section], 4));
  }
  return {std::move(seconds)};
}

// By layer.
template <class List, class F>
JsonValue layers(const List& list, const F& value_of) {
  JsonList values;
  values.reserve(list.size());
  for (const auto& layer : list) values.push_back(value_of(layer));
  return {std::move(values)};
}

JsonValue counts_of(const at::Tensor& counts_E) {
  const at::Tensor held = counts_E.contiguous();
  const auto* count = held.const_data_ptr<std::int64_t>();
  JsonList values;
  values.reserve(static_cast<std::size_t>(held.numel()));
  for (std::int64_t e = 0; e < held.numel(); ++e) values.emplace_back().value = count[e];
  return {std::move(values)};
}

void add_experts(JsonObject& object, const StepRecord& r) {
  if (r.experts.entropy.empty()) return;
  object.emplace_back("expert_entropy",
                      layers(r.experts.entropy, [](double x) { return rounded(x, 6); }));
  object.emplace_back("expert_bias", layers(r.bias, [](const BiasRange& b) {
                        return JsonValue{JsonList{rounded(b.least, 6), rounded(b.largest, 6)}};
                      }));
  if (!r.counts_E.empty()) object.emplace_back("expert_counts", layers(r.counts_E, counts_of));
}

// {"experts": {"activations": {"zeros": [..], "largest": [..]}, ..}, ..}
void add_float8(JsonObject& object, const StepRecord& r) {
  const auto share = [](double x) { return rounded(x, 4); };
  JsonObject all;
  for (const Float8Share& f : r.float8) {
    if (all.empty() || all.back().first != f.products)
      all.emplace_back(f.products, JsonValue{JsonObject{}});
    std::get<JsonObject>(all.back().second.value)
        .emplace_back(f.numbers, JsonValue{JsonObject{{"zeros", layers(f.zeros, share)},
                                                      {"largest", layers(f.largest, share)}}});
  }
  if (!all.empty()) object.emplace_back("float8", JsonValue{std::move(all)});
}

}  // namespace

JsonObject to_json(const StepRecord& r) {
  JsonObject object;
  for (const MetricNumber& m : metric_numbers()) {
    if (!m.found_in(r)) continue;
    const JsonValue value = m.of(r);
    const auto* real = std::get_if<double>(&value.value);
    object.emplace_back(m.name, real ? rounded(*real, m.num_digits) : value);
  }
  object.emplace_back("sections", sections_of(r));
  if (!r.sent.empty()) {
    JsonObject sent;
    for (const auto& [axes, bytes] : r.sent) sent.emplace_back(axes, JsonValue{bytes});
    object.emplace_back("sent", JsonValue{std::move(sent)});
  }
  add_experts(object, r);
  add_float8(object, r);
  if (!r.validation.empty()) {
    JsonObject losses;
    for (const ValidationLoss& v : r.validation) {
      JsonObject of_set{{"loss", rounded(v.loss, 0)}, {"perplexity", rounded(v.perplexity(), 0)}};
      JsonList depths;
      for (const auto& d : v.mtp)
        depths.emplace_back(
            JsonObject{{"loss", rounded(d.loss, 0)}, {"acceptance", rounded(d.acceptance, 0)}});
      if (!depths.empty()) of_set.emplace_back("mtp", JsonValue{std::move(depths)});
      losses.emplace_back(v.name, JsonValue{std::move(of_set)});
    }
    object.emplace_back("validation", JsonValue{std::move(losses)});
  }
  return object;
}

JsonlSink::JsonlSink(const std::filesystem::path& folder, std::int64_t first_step)
    : file_(open_run_folder(folder, first_step)) {}

void JsonlSink::write(const StepRecord& r) {
  file_.write_line(formats::to_json_line({to_json(r)}), r.step);
}

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

// A number as short as it can be read back; nothing where there is none, or it is not finite.
std::string cell_of(const JsonValue& value) {
  if (const auto* flag = std::get_if<bool>(&value.value)) return *flag ? "1" : "0";
  if (const auto* whole = std::get_if<std::int64_t>(&value.value)) return std::to_string(*whole);
  return value.is_null() ? "" : text_of(std::get<double>(value.value));
}

CsvRow row_of(const StepRecord& r, const std::vector<std::string>& validation_names) {
  CsvRow row;
  const auto add = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) row.emplace_back(name, cell_of(metric_number(name).of(r)));
  };
  add({"step", "time", "tokens", "tokens_total", "loss", "total_loss", "balance_loss", "z_loss",
       "mtp_loss", "grad_norm", "lr", "seconds", "tps", "tflops", "peak_fraction", "memory_gib"});
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
  row.emplace_back("sent_bytes", std::to_string(sent));
  add({"expert_max_over_mean", "experts_idle"});
  row.emplace_back(
      "expert_entropy_least",
      entropy.empty() ? "" : text_of(*std::min_element(entropy.begin(), entropy.end())));
  row.emplace_back("expert_bias_least", text_of(least_bias));
  row.emplace_back("expert_bias_largest", text_of(largest_bias));
  add({"skipped"});
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
    if (const std::string kept = kept_rows(before, first_step); kept != before)
      replace_file(path, kept);
    return AppendFile(path);
  }
  if (!before.empty())
    move_file(path,
              path.parent_path() / ("metrics-until-step-" + std::to_string(first_step) + ".csv"));
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

namespace {

std::vector<std::string> validation_names(const config::Config& config) {
  std::vector<std::string> names;
  for (const auto& source : config.validation.source)
    names.push_back(source.name.empty() ? source.path : source.name);
  return names;
}

}  // namespace

MetricSinks open_sinks(const config::Config& config, const RunFacts& facts) {
  MetricSinks sinks;
  if (const std::string& folder = config.metrics.folder; !folder.empty()) {
    sinks.push_back(std::make_unique<JsonlSink>(folder, facts.first_step));
    describe_start(config, facts);
    if (config.metrics.enable_csv)
      sinks.push_back(
          std::make_unique<CsvSink>(folder, facts.first_step, validation_names(config)));
    if (config.metrics.enable_tensorboard)
      sinks.push_back(std::make_unique<TensorBoardSink>(folder, facts.first_step));
  }
  if (!config.metrics.quiet)
    sinks.push_back(std::make_unique<ConsoleSink>(console_options(config, facts.first_step)));
  return sinks;
}

}  // namespace moesh::train
