#include "moesh/report/page.h"

#include <sys/stat.h>

#include <algorithm>
#include <cmath>

#include "moesh/base/error.h"
#include "moesh/formats/byte_source.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"

namespace moesh::report {
namespace {

using formats::JsonList;
using formats::JsonObject;
using formats::JsonValue;

// Most numbers of expert counts that a page has: 4 MB.
constexpr std::size_t kMaxCells = 1'000'000;

// The last `num` names of a path, or all of them.
std::string last_names(const std::filesystem::path& path, std::size_t num) {
  std::vector<std::string> names;
  for (const auto& name : path.relative_path())
    if (!name.empty()) names.push_back(name.string());
  std::string text;
  for (std::size_t i = names.size() - std::min(num, names.size()); i < names.size(); ++i)
    text += (text.empty() ? "" : "/") + names[i];
  return text;
}

std::filesystem::path whole_path(const std::filesystem::path& folder) {
  std::error_code failed;
  const auto whole = std::filesystem::weakly_canonical(folder, failed);
  return failed ? folder : whole;
}

// "outputs/earlier": but the folder that a run has by default says little about it.
std::string name_of(const std::filesystem::path& folder) {
  const auto whole = whole_path(folder);
  return last_names(whole, whole.filename() == "outputs" ? 1 : 2);
}

}  // namespace

RunData::RunData(const std::filesystem::path& folder) : folder_(folder), name_(name_of(folder)) {
  std::error_code none;  // a name that is too long, say, is that of no folder
  MOESH_CHECK(std::filesystem::is_directory(folder, none), ErrorKind::config, "'", folder.string(),
              "' is not a folder; name the metrics.folder of a run");
  MOESH_CHECK(std::filesystem::exists(folder / "metrics.jsonl", none), ErrorKind::config, "'",
              folder.string(),
              "' has no metrics.jsonl: no run has written its metrics there; name the "
              "metrics.folder of one");
  update();
}

void tell_apart(std::vector<RunData>& runs) {
  const auto is_taken = [&](const RunData& run) {
    return std::any_of(runs.begin(), runs.end(), [&](const RunData& other) {
      return &other != &run && other.name_ == run.name_;
    });
  };
  for (std::size_t i = runs.size(); i-- > 1;)  // one folder twice
    for (std::size_t k = 0; k < i; ++k)
      if (whole_path(runs[i].folder_) == whole_path(runs[k].folder_)) {
        runs[i].name_ += detail::concat(" (", i + 1, ")");
        break;
      }
  // One more name of the path for all that are called the same, until none is.
  for (std::size_t num = 2; num < 100; ++num) {
    std::vector<RunData*> same;
    for (RunData& run : runs)
      if (is_taken(run)) same.push_back(&run);
    if (same.empty()) return;
    for (RunData* run : same) run->name_ = last_names(whole_path(run->folder_), num);
  }
}

void RunData::clear() {
  ++generation_;
  offset_ = 0, size_ = 0, stride_ = 1, num_counted_ = 0;
  columns_.clear(), frames_.clear();
}

void RunData::read_starts() {
  starts_.clear();
  const auto path = folder_ / "starts.jsonl";
  if (!formats::exists(path)) return;
  formats::LineReader lines(formats::open_bytes(path.string()), formats::kMaxLineBytes);
  std::uint64_t size = 0;
  for (std::string line; lines.next(line, size);) try {
      starts_.push_back(formats::parse_json(line, "starts.jsonl"));
    } catch (const Error&) {  // cut off
    }
}

void RunData::update() {
  const auto path = folder_ / "metrics.jsonl";
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) return;  // between two names
  const bool is_another =
      status.st_ino != file_id_ || static_cast<std::uint64_t>(status.st_size) < offset_;
  if (is_another) clear();
  file_id_ = status.st_ino;
  if (is_another || static_cast<std::uint64_t>(status.st_size) > offset_) read_starts();
  formats::LineReader lines(formats::open_bytes(path.string(), offset_), formats::kMaxLineBytes);
  std::uint64_t size = 0;
  for (std::string line; lines.next(line, size);) {
    if (!lines.ended_with_newline()) break;  // its end is not written yet
    offset_ += size + 1;
    add(line);
  }
}

void RunData::add(const std::string& line) {
  JsonValue record;
  std::int64_t step = 0;
  try {
    record = formats::parse_json(line, "metrics.jsonl");
    step = record.at("step", "metrics.jsonl").as_int("step");
  } catch (const Error&) {
    return;  // cut off by a full disk
  }
  ++size_;
  for (const auto& [key, value] : record.as_object("record")) try {
      add_entry(step, key, value);
    } catch (const Error&) {  // not as moesh writes it: a report shows the rest
    }
  for (auto& [name, column] : columns_) column.resize(size_, std::nan(""));
}

void RunData::add_entry(std::int64_t step, const std::string& key, const JsonValue& value) {
  if (key == "expert_counts") {
    add_frame(step, value);
  } else if (key == "validation") {
    for (const auto& [name, losses] : value.as_object("validation"))
      if (const JsonValue* loss = losses.find("loss")) add_numbers("validation." + name, *loss);
  } else if (key == "expert_bias") {
    double widest = 0;
    for (const JsonValue& layer : value.as_list("expert_bias"))
      if (const auto& range = layer.as_list("expert_bias");
          range.size() == 2 && !range[0].is_null() && !range[1].is_null())
        widest = std::max(widest, range[1].as_number("") - range[0].as_number(""));
    set("bias_range", widest);
  } else {
    add_numbers(key, value);
  }
}

void RunData::add_numbers(const std::string& name, const JsonValue& value) {
  if (const auto* object = std::get_if<JsonObject>(&value.value)) {
    for (const auto& [key, part] : *object) add_numbers(name + "." + key, part);
  } else if (const auto* list = std::get_if<JsonList>(&value.value)) {
    for (std::size_t i = 0; i < list->size(); ++i)
      add_numbers(name + "." + std::to_string(i), (*list)[i]);
  } else if (const auto* flag = std::get_if<bool>(&value.value)) {
    set(name, *flag ? 1 : 0);
  } else if (!value.is_null() && !std::holds_alternative<std::string>(value.value)) {
    set(name, value.as_number(name));
  }
}

void RunData::set(const std::string& name, double value) {
  auto& column = columns_[name];
  column.resize(size_, std::nan(""));
  column.back() = value;
}

// Where there are too many, every second goes, and from then on every second is left out.
void RunData::add_frame(std::int64_t step, const JsonValue& counts) {
  const auto& layers = counts.as_list("expert_counts");
  std::size_t num_experts = 0;
  for (const auto& layer : layers)
    num_experts = std::max(num_experts, layer.as_list("expert_counts").size());
  if (layers.empty() || num_experts == 0) return;
  if (layers.size() != num_layers_ || num_experts != num_experts_) frames_.clear();
  num_layers_ = layers.size(), num_experts_ = num_experts;
  if (num_counted_++ % stride_ != 0) return;
  Frame frame{.step = step, .counts = std::vector<std::uint32_t>(num_layers_ * num_experts_)};
  for (std::size_t l = 0; l < num_layers_; ++l) {
    const auto& layer = layers[l].as_list("expert_counts");
    for (std::size_t e = 0; e < layer.size(); ++e)
      frame.counts[l * num_experts_ + e] = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(layer[e].as_size("count"), UINT32_MAX));
  }
  frames_.push_back(std::move(frame));
  const std::size_t most =
      std::clamp<std::size_t>(kMaxCells / (num_layers_ * num_experts_), 8, 400);
  if (frames_.size() <= most) return;
  std::size_t kept = 1;
  for (std::size_t i = 2; i < frames_.size(); i += 2) frames_[kept++] = std::move(frames_[i]);
  frames_.resize(kept);
  stride_ *= 2;
}

}  // namespace moesh::report
