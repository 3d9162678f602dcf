#include "moesh/report/page.h"

#include <cstring>
#include <string_view>

#include "moesh/base/error.h"

namespace moesh::report {
namespace {

using formats::JsonList;
using formats::JsonObject;
using formats::JsonValue;

std::string base64(const void* data, std::size_t size) {
  constexpr const char* kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const auto* byte = static_cast<const unsigned char*>(data);
  std::string text;
  text.reserve((size + 2) / 3 * 4);
  for (std::size_t i = 0; i < size; i += 3) {
    const std::size_t left = std::min<std::size_t>(3, size - i);
    std::uint32_t bits = 0;
    for (std::size_t k = 0; k < 3; ++k) bits = bits << 8 | (k < left ? byte[i + k] : 0u);
    for (std::size_t k = 0; k < 4; ++k)
      text += k <= left ? kDigits[bits >> (18 - 6 * k) & 63] : '=';
  }
  return text;
}

// Times and positions need more digits than a curve does.
bool needs_double(const std::string& name) {
  return name == "step" || name == "time" || name == "tokens_total";
}

JsonValue encoded(const std::string& name, const std::vector<double>& column, std::size_t first) {
  if (needs_double(name))
    return {JsonObject{
        {"d", {base64(column.data() + first, (column.size() - first) * sizeof(double))}}}};
  const std::vector<float> narrow(column.begin() + static_cast<std::ptrdiff_t>(first),
                                  column.end());
  return {JsonObject{{"f", {base64(narrow.data(), narrow.size() * sizeof(float))}}}};
}

JsonValue frames_of(const RunData& run, std::int64_t after) {
  JsonList steps;
  std::vector<std::uint32_t> counts;
  for (const Frame& frame : run.frames()) {
    if (frame.step <= after) continue;
    steps.emplace_back().value = frame.step;
    counts.insert(counts.end(), frame.counts.begin(), frame.counts.end());
  }
  return {JsonObject{{"layers", {static_cast<std::int64_t>(run.num_layers())}},
                     {"experts", {static_cast<std::int64_t>(run.num_experts())}},
                     {"steps", {std::move(steps)}},
                     {"counts", {base64(counts.data(), counts.size() * sizeof counts[0])}}}};
}

JsonValue run_of(const RunData& run, const PageState& known) {
  const bool goes_on = known.generation == run.generation() && known.num_records <= run.size();
  const std::size_t first = goes_on ? known.num_records : 0;
  JsonObject columns;
  for (const auto& [name, column] : run.columns())
    columns.emplace_back(name, encoded(name, column, first));
  return {JsonObject{{"name", {run.name()}},
                     {"generation", {run.generation()}},
                     {"starts", {run.starts()}},
                     {"count", {static_cast<std::int64_t>(run.size() - first)}},
                     {"columns", {std::move(columns)}},
                     {"frames", frames_of(run, goes_on ? known.last_frame : -1)}}};
}

JsonValue runs_of(const std::vector<RunData>& runs, const std::vector<PageState>& known) {
  JsonList all;
  for (std::size_t i = 0; i < runs.size(); ++i)
    all.push_back(run_of(runs[i], i < known.size() ? known[i] : PageState{}));
  return {std::move(all)};
}

// Within a script element nothing may look like the end of it, or like a comment.
std::string in_script(std::string_view text) {
  std::string safe;
  for (const char c : text) safe += c == '<' ? std::string("\\u003c") : std::string(1, c);
  return safe;
}

std::string in_html(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    if (c == '<')
      safe += "&lt;";
    else if (c == '&')
      safe += "&amp;";
    else
      safe += c;
  }
  return safe;
}

}  // namespace

std::string runs_json(const std::vector<RunData>& runs, const std::vector<PageState>& known) {
  return formats::to_json_line({JsonObject{{"runs", runs_of(runs, known)}}});
}

std::string page(const std::vector<RunData>& runs, const std::vector<VerifyResult>& verified,
                 int live_ms) {
  MOESH_CHECK(*kDygraphsJs, ErrorKind::config,
              "this moesh was built without dygraphs, which draws the curves of a report: install "
              "libjs-dygraphs (Debian and Ubuntu; scripts/setup.sh does), and build moesh again");
  JsonList results;
  for (const auto& [name, result] : verified) {
    JsonObject entry = result.as_object(name);
    entry.emplace_back("name", JsonValue{name});
    results.push_back({std::move(entry)});
  }
  const std::string data = formats::to_json_line({JsonObject{{"live", {std::int64_t{live_ms}}},
                                                             {"runs", runs_of(runs, {})},
                                                             {"verify", {std::move(results)}}}});
  std::string title = "moesh report";
  for (const RunData& run : runs) title += (&run == runs.data() ? ": " : ", ") + run.name();
  return detail::concat(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      // Nothing of the page can reach the network, but for the server that it came from.
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:\">\n"
      "<link rel=\"icon\" href=\"data:,\">\n<title>",
      in_html(title), "</title>\n<style>\n", kDygraphsCss, "\n", kPageCss,
      "</style>\n</head>\n<body>\n", kPageHtml, "<script type=\"application/json\" id=\"data\">",
      in_script(data), "</script>\n<script>\n/* dygraphs:\n", kDygraphsLicence, "*/\n", kDygraphsJs,
      "\n</script>\n<script>\n(() => {\n'use strict';\n", kPageJs,
      "})();\n</script>\n</body>\n</html>\n");
}

VerifyResult read_verify(const std::string& path) {
  VerifyResult verified{.name = path, .result = formats::read_json(path)};
  const JsonValue* meshes = verified.result.find("meshes");
  MOESH_CHECK(
      meshes && std::holds_alternative<JsonList>(meshes->value) && verified.result.find("seconds"),
      ErrorKind::config, "'", path,
      "' is not a result of moesh verify --json: it has no list of meshes");
  for (const JsonValue& mesh : std::get<JsonList>(meshes->value)) {
    mesh.at("mesh", path).as_text(path);
    mesh.at("holds", path).as_bool(path);
  }
  return verified;
}

}  // namespace moesh::report
