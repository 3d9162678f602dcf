#include "moesh/checkpoint/folder.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <ctime>
#include <optional>
#include <span>
#include <string_view>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/load.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/json.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/name.h"
#include "moesh/formats/safetensors.h"

namespace moesh::checkpoint {

namespace {

constexpr std::string_view kStep = "step-";
constexpr std::string_view kTemporary = ".saving-", kReplaced = ".replaced-", kPurged = ".purging-";

std::string named(std::string_view prefix, std::int64_t step) {
  return std::string(prefix) + step_name(step);
}

// The step whose folder has this name.
std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  std::int64_t step = 0;
  std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
  return name == step_name(step) ? std::optional(step) : std::nullopt;
}

bool is_left_over(std::string_view name) {
  for (const auto prefix : {kTemporary, kReplaced, kPurged})
    if (name.starts_with(prefix)) return step_of(name.substr(prefix.size())).has_value();
  return false;
}

}  // namespace

std::string step_name(std::int64_t step) {
  char text[40];
  std::snprintf(text, sizeof text, "%s%08lld", kStep.data(), static_cast<long long>(step));
  return text;
}
std::string temporary_name(std::int64_t step) { return named(kTemporary, step); }
std::string replaced_name(std::int64_t step) { return named(kReplaced, step); }
std::string purged_name(std::int64_t step) { return named(kPurged, step); }

std::vector<std::int64_t> saved_steps(const std::filesystem::path& folder) {
  std::vector<std::int64_t> steps;
  for (const auto& name : formats::names_in(folder))
    if (const auto step = step_of(name)) steps.push_back(*step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

formats::Manifest read_intact_manifest(const std::filesystem::path& checkpoint) {
  formats::Manifest manifest = formats::read_manifest(checkpoint.string());
  for (const auto& file : manifest.files) {
    const auto path = checkpoint / file.name;
    struct stat status;
    if (formats::retried([&] { return formats::file_system().status(path, status); }) != 0)
      formats::fail_at(path, "look at", errno);
    const auto size = static_cast<std::uint64_t>(status.st_size);
    MOESH_CHECK(size == file.size, ErrorKind::data, "'", path.string(), "' has ", size,
                " bytes, and the manifest says ", file.size);
  }
  return manifest;
}

bool is_intact(const std::filesystem::path& checkpoint) {
  try {
    read_intact_manifest(checkpoint);
    return true;
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::storage) throw;
    return false;
  }
}

void remove_temporary(const std::filesystem::path& folder) {
  for (const auto& name : formats::names_in(folder)) {
    if (!is_left_over(name)) continue;
    const auto names = formats::is_own_folder(folder / name) ? formats::names_in(folder / name)
                                                             : std::vector<std::string>{""};
    if (names.empty() ||
        std::find(names.begin(), names.end(), formats::kManifestFile) != names.end())
      try {
        remove_folder(folder / name);
      } catch (const Error& e) {
        // It takes room, and no more: the next save tries again.
        log_warn("what an interrupted save has left could not be removed: ", e.what());
      }
    else
      log_warn("'", (folder / name).string(), "' was not made by moesh, and stays");
  }
}

void purge(const std::filesystem::path& folder, std::int64_t newest, std::int64_t keep,
           const std::set<std::int64_t>& known) {
  const auto extra = read_intact_manifest(folder / step_name(newest)).extra;
  std::int64_t num_skipped = 0;
  if (const auto text = extra.find(kSkippedSteps); text != extra.end())
    std::from_chars(text->second.data(), text->second.data() + text->second.size(), num_skipped);
  std::vector<std::int64_t> intact;
  std::int64_t proven = -1;
  for (const std::int64_t step : saved_steps(folder)) {
    if (step > newest || (step != newest && !known.contains(step)) ||
        !is_intact(folder / step_name(step)))
      continue;
    intact.push_back(step);
    if (step < newest - num_skipped) proven = step;
  }
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < intact.size(); ++i) {
    if (intact[i] == proven) continue;
    // Under another name it is not a checkpoint any more: what is half removed cannot be taken for
    // one, and the next run removes the rest.
    const auto going = folder / purged_name(intact[i]);
    rename_folder(folder / step_name(intact[i]), going);
    remove_folder(going);
  }
  sync_folder(folder);
}

namespace {

// As long as the longest host name and the rest: a shorter text overwrites a longer one.
constexpr std::size_t kHolderBytes = 400;

std::string own_name() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 40> since{};
  std::strftime(since.data(), since.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  std::string text =
      detail::concat("process ", ::getpid(), " on ", host.data(), " since ", since.data());
  text.resize(kHolderBytes - 1, ' ');
  return text + '\n';
}

std::string holder(const std::filesystem::path& path) {
  const formats::InputFile file(path);
  std::string text(std::min<std::uint64_t>(file.size(), kHolderBytes), ' ');
  file.read(0, std::as_writable_bytes(std::span(text)));
  const auto end = text.find_last_not_of(" \n");
  return end == std::string::npos ? "another process" : text.substr(0, end + 1);
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder)
    : file_((make_folders(folder), folder / kLockFile), formats::OutputFile::Mode::open_or_create) {
  MOESH_CHECK(file_.lock(), ErrorKind::config, "'", folder.string(), "' is used by ",
              holder(folder / kLockFile), "; wait until that has ended, or choose another folder");
  // Also a probe: a folder that cannot be written is noticed before the first step.
  file_.write(0, own_name());
}

namespace {

constexpr std::uint64_t kMaxBytes = 256 << 20;

bool is_companion(const std::filesystem::path& folder, const std::string& name) {
  const std::string kind = std::filesystem::path(name).extension().string();
  const auto kinds = {".json", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".py"};
  const bool is_small =
      std::find(kinds.begin(), kinds.end(), kind) != kinds.end() || name == "LICENSE";
  return is_small && !formats::is_folder(folder / name) && name[0] != '.' &&
         name != "config.json" && name != formats::kIndexFile && name != formats::kManifestFile;
}

// Whether what has this name in the folder is a link to elsewhere, which is nothing of the model.
// In the cache of a hub, snapshots/REVISION has links to the blobs beside snapshots.
bool leads_out(const std::filesystem::path& folder, const std::string& name) {
  struct stat status;
  if (formats::file_system().link_status(folder / name, status) == 0 && !S_ISLNK(status.st_mode))
    return false;
  std::error_code failed;
  const auto home = std::filesystem::canonical(folder, failed),
             target = std::filesystem::canonical(folder / name, failed);
  if (failed) return false;  // reading it says why
  const auto is_below = [&](const std::filesystem::path& place) {
    return std::mismatch(place.begin(), place.end(), target.begin(), target.end()).first ==
           place.end();
  };
  const bool is_snapshot = home.parent_path().filename() == "snapshots";
  return !is_below(home) && !(is_snapshot && is_below(home.parent_path().parent_path() / "blobs"));
}

}  // namespace

std::map<std::string, std::string> read_companions(const std::filesystem::path& folder) {
  std::map<std::string, std::string> all;
  // They are no part of the model: one that cannot travel ends no run.
  const auto leave_out = [&](const std::string& name, const std::string& reason) {
    log_warn(formats::shown((folder / name).string()), " is left out of checkpoints: ", reason,
             "; copy it yourself if it belongs there");
  };
  const auto manifest = formats::find_manifest(folder);
  for (const auto& name : formats::names_in(folder)) {
    if (!is_companion(folder, name)) continue;
    if (leads_out(folder, name)) {
      leave_out(name, "it is a link to a file outside of this folder");
      continue;
    }
    try {
      formats::check_file_name(name);
      formats::json_quoted(name);  // for the list of files in moesh.json
      const formats::InputFile file(folder / name);
      // Files that were put there later are not part of the checkpoint, and nothing is known of
      // them.
      const bool is_known = manifest && manifest->find(name);
      if (file.size() > kMaxBytes)
        leave_out(name, detail::concat("it has ", file.size(), " bytes"));
      else
        all[name] = is_known ? read_text(folder, name, &*manifest) : file.read_all(kMaxBytes);
    } catch (const Error& e) {
      leave_out(name, e.what());
    }
  }
  return all;
}

std::string with_token_ids(const std::string& config_json, const std::string& of) {
  formats::JsonValue json = formats::parse_json(config_json, "config.json");
  const formats::JsonValue theirs = formats::parse_json(of, "config.json");
  auto& fields = std::get<formats::JsonObject>(json.value);
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    const auto* id = theirs.find(key);
    if (!id) continue;
    std::erase_if(fields, [&](const auto& entry) { return entry.first == key; });
    fields.emplace_back(key, *id);
  }
  return formats::to_json(json);
}

}  // namespace moesh::checkpoint
