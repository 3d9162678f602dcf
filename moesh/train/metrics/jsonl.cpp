#include "moesh/train/metrics/jsonl.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/file.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/json.h"
#include "moesh/train/metrics/kept_lines.h"

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

// Longer than any run of these has written: 2^33 bytes are thirty million steps.
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 33;

std::string bytes_of(const std::filesystem::path& path) {
  return formats::exists(path) ? formats::InputFile(path).read_all(kMaxBytes) : "";
}

// Whether an open file is the one that has the name.
bool has_name(int file, const std::filesystem::path& path) {
  struct stat opened = {}, named = {};
  if (formats::file_system().status(file, opened) != 0) formats::fail_at(path, "look at", errno);
  if (formats::file_system().status(path, named) == 0)
    return opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
  if (errno != ENOENT) formats::fail_at(path, "look at", errno);
  return false;
}

// Open for lines at its end, and for no other run as long as it is. A file system without locks
// gives no such protection.
int open_alone(const std::filesystem::path& path, const std::filesystem::path& folder) {
  for (;;) {
    const int file = formats::file_system().open(path, O_WRONLY | O_CREAT | O_APPEND);
    if (file < 0) formats::fail_at(path, "open", errno);
    try {
      const bool is_held =
          formats::file_system().lock(file) != 0 && (errno == EAGAIN || errno == EACCES);
      MOESH_CHECK(!is_held, ErrorKind::config, "metrics.folder '", folder.string(),
                  "' is used by another run; wait until that has ended, or choose another folder");
      // A run that was taking the lines over may have put another file in its place since it was
      // opened: that one is to be held.
      if (has_name(file, path)) return file;
    } catch (...) {
      formats::file_system().close(file);
      throw;
    }
    formats::file_system().close(file);
  }
}

}  // namespace

JsonlSink::JsonlSink(const std::filesystem::path& folder, std::int64_t first_step)
    : path_(folder / "metrics.jsonl") {
  try {
    checkpoint::make_folders(folder);
    file_ = open_alone(path_, folder);
    const std::string before = bytes_of(path_);
    const std::string kept = kept_lines(before, path_.string(), first_step);
    if (kept != before) {
      // Beside, and under its name only when it is on the disk: who is killed loses no line.
      const auto beside = std::filesystem::path(path_).concat(".new");
      if (formats::exists(beside) && formats::file_system().remove(beside) != 0)
        formats::fail_at(beside, "remove", errno);
      checkpoint::write_file(beside, kept);
      // The new one is held before it has the name, and the old one until then.
      const int held = std::exchange(file_, open_alone(beside, folder));
      const int result = formats::file_system().rename(beside, path_), code = errno;
      formats::file_system().close(held);
      if (result != 0) formats::fail_at(path_, "replace", code);
    }
  } catch (const Error& e) {
    if (file_ >= 0) formats::file_system().close(file_);  // no destructor runs
    if (e.kind() == ErrorKind::config) throw;
    throw Error(ErrorKind::storage,
                detail::concat("metrics.folder = '", folder.string(),
                               "' cannot be written; choose a folder that can be: ", e.what()));
  }
}

JsonlSink::~JsonlSink() {
  if (file_ >= 0) formats::file_system().close(file_);
}

void JsonlSink::finish() {
  if (num_lost_ > 0) log_warn("'", path_.string(), "': ", num_lost_, " lines could not be written");
}

void JsonlSink::write(const StepRecord& r) {
  JsonObject object{
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
  };
  if (!r.validation.empty()) {
    JsonObject losses;
    for (const ValidationLoss& v : r.validation)
      losses.emplace_back(v.name, JsonValue{JsonObject{{"loss", exact(v.loss)},
                                                       {"perplexity", exact(v.perplexity())}}});
    object.emplace_back("validation", JsonValue{std::move(losses)});
  }
  std::string line = formats::to_json_line({std::move(object)});
  if (is_cut_off_) line.insert(0, "\n");
  std::string_view rest = line;
  while (!rest.empty()) {
    const auto count = formats::file_system().append(file_, rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (num_lost_++ == 0)
        log_warn("'", path_.string(),
                 "' cannot be written: ", count < 0 ? std::strerror(errno) : "no byte was taken",
                 "; metrics from step ", r.step, " on are lost until it can");
      break;
    }
    rest.remove_prefix(static_cast<std::size_t>(count));
    is_cut_off_ = true;
  }
  if (rest.empty()) is_cut_off_ = false;
}

}  // namespace moesh::train
