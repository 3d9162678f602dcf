#include "moesh/checkpoint/folder.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <optional>
#include <string_view>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/file.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"

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

}  // namespace moesh::checkpoint
