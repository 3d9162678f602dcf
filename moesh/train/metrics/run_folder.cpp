#include "moesh/train/metrics/run_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/base/text.h"
#include "moesh/base/version.h"
#include "moesh/checkpoint/file.h"
#include "moesh/comm/launch.h"
#include "moesh/config/options.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/json.h"
#include "moesh/train/metrics/record.h"

namespace moesh::train {

AppendFile::AppendFile(const std::filesystem::path& path)
    : path_(path), file_(formats::file_system().open(path, O_WRONLY | O_CREAT | O_APPEND)) {
  if (file_ < 0) formats::fail_at(path, "open", errno);
}

AppendFile::~AppendFile() {
  if (file_ >= 0) formats::file_system().close(file_);
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      num_lost_(other.num_lost_),
      is_cut_off_(other.is_cut_off_) {}

AppendFile& AppendFile::operator=(AppendFile&& other) noexcept {
  std::swap(path_, other.path_), std::swap(file_, other.file_);
  std::swap(num_lost_, other.num_lost_), std::swap(is_cut_off_, other.is_cut_off_);
  return *this;
}

bool AppendFile::lock() {
  return formats::file_system().lock(file_) == 0 || (errno != EAGAIN && errno != EACCES);
}

bool AppendFile::has_name() const {
  struct stat opened = {}, named = {};
  if (formats::file_system().status(file_, opened) != 0) formats::fail_at(path_, "look at", errno);
  if (formats::file_system().status(path_, named) == 0)
    return opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
  if (errno != ENOENT) formats::fail_at(path_, "look at", errno);
  return false;
}

bool AppendFile::write(std::string_view bytes, std::int64_t step) {
  while (!bytes.empty()) {
    const auto count = formats::file_system().append(file_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (num_lost_++ == 0)
        log_warn("'", path_.string(),
                 "' cannot be written: ", count < 0 ? std::strerror(errno) : "no byte was taken",
                 "; metrics from step ", step, " on are lost until it can");
      return false;
    }
    bytes.remove_prefix(static_cast<std::size_t>(count));
    is_cut_off_ = true;
  }
  is_cut_off_ = false;
  return true;
}

void AppendFile::write_line(const std::string& line, std::int64_t step) {
  write(is_cut_off_ ? "\n" + line : line, step);
}

void AppendFile::finish() {
  if (num_lost_ > 0) log_warn("'", path_.string(), "': ", num_lost_, " lines could not be written");
}

namespace {

using formats::JsonObject;
using formats::JsonValue;
using std::filesystem::path;

constexpr const char* kMetrics = "metrics.jsonl";
// Longer than any run of these has written: 2^33 bytes are millions of steps.
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 33;

std::string bytes_of(const path& file) {
  return formats::exists(file) ? formats::InputFile(file).read_all(kMaxBytes) : "";
}

AppendFile open_alone(const path& file, const path& folder) {
  for (;;) {
    AppendFile opened(file);
    MOESH_CHECK(opened.lock(), ErrorKind::config, "metrics.folder '", folder.string(),
                "' is used by another run; wait until that has ended, or choose another folder");
    // A run that was taking the lines over may have put another file in its place since it was
    // opened: that one is to be held.
    if (opened.has_name()) return opened;
  }
}

bool belongs_to_run(const std::string& name) {
  return name == "metrics.csv" || name == "tensorboard" || name == "config.toml" ||
         name == "starts.jsonl" || name == "replaced.jsonl" ||
         name.starts_with("metrics-until-step-") || name.starts_with("flight-rank-") ||
         name.starts_with("trace-steps-");
}

// The run that was here gets a folder of its own. Its metrics.jsonl goes last: as long as that is
// here, the next start goes on with the same folder.
void set_aside(const path& folder) {
  path target;
  for (int number = 1; target.empty() || formats::exists(target / kMetrics); ++number)
    target = folder / "earlier" / formatted("%04d", number);
  checkpoint::make_folders(target);
  for (const std::string& name : formats::names_in(folder))
    if (belongs_to_run(name)) move_file(folder / name, target / name);
  move_file(folder / kMetrics, target / kMetrics);
}

// The lines that are not in `kept`, which is `before` without them.
std::string replaced_lines(const std::string& before, const std::string& kept) {
  std::string replaced;
  std::size_t at = 0;
  for (std::size_t begin = 0; begin < before.size();) {
    const std::size_t end = std::min(before.find('\n', begin), before.size() - 1) + 1;
    const std::string_view line(before.data() + begin, end - begin);
    if (std::string_view(kept).substr(at, line.size()) == line)
      at += line.size();
    else
      replaced += line;
    begin = end;
  }
  if (!replaced.empty() && replaced.back() != '\n') replaced += '\n';
  return replaced;
}

std::string host_name() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

JsonValue mesh_of(const MeshShape& shape) {
  JsonObject sizes;
  for (const Axes axis : {pp, dp_replicate, dp_shard, cp, tp, efsdp, ep, etp})
    sizes.emplace_back(to_string(axis), JsonValue{std::int64_t{shape.size(axis)}});
  return {std::move(sizes)};
}

}  // namespace

void move_file(const path& from, const path& to) {
  if (formats::file_system().rename(from, to) != 0) formats::fail_at(from, "move", errno);
}

void replace_file(const path& file, const std::string& text) {
  const path beside = path(file).concat(".new");
  formats::file_system().remove(beside);
  checkpoint::write_file(beside, text);
  move_file(beside, file);
}

AppendFile open_run_folder(const path& folder, std::int64_t first_step) {
  try {
    checkpoint::make_folders(folder);
    const path file = folder / kMetrics;
    AppendFile opened = open_alone(file, folder);
    const std::string before = bytes_of(file);
    if (before.empty()) return opened;
    if (first_step == 0) {
      set_aside(folder);
      return open_alone(file, folder);
    }
    const std::string kept = formats::kept_lines(before, file.string(), first_step);
    if (kept == before) return opened;
    AppendFile(folder / "replaced.jsonl").write(replaced_lines(before, kept), first_step);
    // Beside, and under its name only when it is on the disk: a process that is killed loses no
    // line.
    const path beside = path(file).concat(".new");
    if (formats::exists(beside) && formats::file_system().remove(beside) != 0)
      formats::fail_at(beside, "remove", errno);
    checkpoint::write_file(beside, kept);
    // The new one is held before it has the name, and the old one until then.
    AppendFile anew = open_alone(beside, folder);
    move_file(beside, file);
    return anew;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::config) throw;
    throw Error(ErrorKind::storage, detail::concat("metrics.folder = '", folder.string(),
                                                   "' cannot be written: ", e.what()));
  }
}

void describe_start(const config::Config& config, const RunFacts& facts) {
  const path folder = config.metrics.folder;
  const std::string text = print_config(config);
  JsonObject start{
      {"time", {seconds_since_1970()}},
      {"first_step", {facts.first_step}},
      {"steps", {config.training.steps}},
      {"host", {host_name()}},
      {"process", {std::int64_t{getpid()}}},
      {"processes", {std::int64_t{std::max(1, comm::num_launched_processes())}}},
      {"cores", {static_cast<std::int64_t>(std::thread::hardware_concurrency())}},
      {"device", {config.training.device}},
      {"device_name", {device_name(config.training.device)}},
      {"moesh", {version()}},
      {"torch", {torch_version()}},
      {"model", {model_argument(config)}},
      {"parameters", {facts.num_parameters}},
      {"active_parameters", {facts.num_active_parameters}},
      {"flops_per_token", {facts.flops_per_token}},
      {"ranks", {std::int64_t{facts.num_ranks}}},
      {"mesh", mesh_of(mesh_shape(config).validated())},
  };
  if (facts.peak_tflops > 0) start.emplace_back("peak_tflops", JsonValue{facts.peak_tflops});
  if (facts.estimated_memory)
    start.emplace_back("estimated_memory", JsonValue{*facts.estimated_memory});
  if (facts.memory_before_gib)
    start.emplace_back("memory_before_gib", JsonValue{*facts.memory_before_gib});
  start.emplace_back("config", JsonValue{text});
  replace_file(folder / "config.toml", text);
  AppendFile(folder / "starts.jsonl").write(formats::to_json_line({std::move(start)}), 0);
}

}  // namespace moesh::train
