#include "moesh/train/metrics/jsonl.h"

#include <charconv>
#include <cmath>
#include <string>

#include "moesh/base/error.h"
#include "moesh/formats/json.h"

namespace moesh::train {
namespace {

using formats::JsonObject;
using formats::JsonValue;

// A measured number, rounded to what can mean something. JSON has no infinity and no NaN: null.
JsonValue rounded(double x, int num_digits) {
  if (!std::isfinite(x)) return {nullptr};
  char text[40];
  const auto end =
      std::to_chars(text, text + sizeof text, x, std::chars_format::general, num_digits).ptr;
  std::from_chars(text, end, x);
  return {x};
}

// With all its digits: runs on two meshes are compared by these.
JsonValue exact(double x) { return std::isfinite(x) ? JsonValue{x} : JsonValue{nullptr}; }

// The step of a line of this file; none if it is something else, such as a line that was cut off.
std::optional<std::int64_t> step_of(const std::string& line, const std::string& name) {
  try {
    return formats::parse_json(line, name).at("step", name).as_int(name);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string kept_lines(const std::filesystem::path& path, std::int64_t first_step) {
  std::ifstream file(path);
  std::string kept;
  for (std::string line; first_step > 0 && std::getline(file, line);)
    if (const auto step = step_of(line, path.string()); step && *step <= first_step)
      kept += line + "\n";
  return kept;
}

}  // namespace

JsonlSink::JsonlSink(const std::filesystem::path& folder, std::int64_t first_step) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  const auto path = folder / "metrics.jsonl";
  const std::string before = kept_lines(path, first_step);
  file_.open(path, std::ios::trunc);
  file_ << before << std::flush;
  MOESH_CHECK(file_.good(), ErrorKind::config, "metrics.folder = '", folder.string(),
              "' cannot be written; choose a folder that can be");
}

void JsonlSink::write(const StepRecord& r) {
  file_ << formats::to_json_line({JsonObject{
               {"step", {r.step}},
               {"loss", exact(r.loss)},
               {"total_loss", exact(r.total_loss)},
               {"grad_norm", exact(r.grad_norm)},
               {"lr", rounded(r.lr, 9)},
               {"seconds", rounded(r.seconds, 6)},
               {"tps", rounded(r.tokens_per_second(), 6)},
               {"tflops", rounded(r.tflops(), 6)},
               {"memory_gib", rounded(r.memory_gib, 4)},
               {"expert_max_over_mean", rounded(r.experts.max_over_mean, 6)},
               {"experts_idle", {r.experts.num_idle}},
               {"tokens", {r.num_tokens}},
               {"skipped", {r.skipped}},
           }})
        << std::flush;
}

}  // namespace moesh::train
