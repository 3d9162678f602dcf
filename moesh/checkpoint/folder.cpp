#include "moesh/checkpoint/folder.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/checkpoint/fail_point.h"
#include "moesh/checkpoint/file.h"

namespace moesh::checkpoint {
namespace {

constexpr std::string_view kStep = "step-";
constexpr std::string_view kTemporary = ".saving-", kReplaced = ".replaced-";

bool is_left_over(const std::string& name) {
  return name.starts_with(kTemporary) || name.starts_with(kReplaced);
}

}  // namespace

std::string step_name(std::int64_t step) {
  char text[40];
  std::snprintf(text, sizeof text, "%s%08lld", kStep.data(), static_cast<long long>(step));
  return text;
}
std::string temporary_name(std::int64_t step) { return std::string(kTemporary) + step_name(step); }
std::string replaced_name(std::int64_t step) { return std::string(kReplaced) + step_name(step); }

std::vector<std::int64_t> saved_steps(const std::filesystem::path& folder) {
  std::vector<std::int64_t> steps;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kStep)) continue;
    std::int64_t step = 0;
    std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
    if (name == step_name(step)) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

formats::Manifest read_intact_manifest(const std::filesystem::path& checkpoint) {
  formats::Manifest manifest = formats::read_manifest(checkpoint.string());
  for (const auto& file : manifest.files) {
    std::error_code missing;
    const auto size = std::filesystem::file_size(checkpoint / file.name, missing);
    MOESH_CHECK(!missing, ErrorKind::data, "'", (checkpoint / file.name).string(),
                "' does not exist: ", missing.message());
    MOESH_CHECK(size == file.size, ErrorKind::data, "'", (checkpoint / file.name).string(),
                "' has ", size, " bytes, and the manifest says ", file.size);
  }
  return manifest;
}

bool is_intact(const std::filesystem::path& checkpoint) {
  try {
    read_intact_manifest(checkpoint);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void remove_temporary(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (is_left_over(entry.path().filename().string())) found.push_back(entry.path());
  for (const auto& path : found) std::filesystem::remove_all(path);
}

void purge(const std::filesystem::path& folder, std::int64_t newest, std::int64_t keep) {
  MOESH_FAIL_POINT(before_the_purge);
  std::vector<std::int64_t> intact;
  for (const std::int64_t step : saved_steps(folder))
    if (step <= newest && is_intact(folder / step_name(step))) intact.push_back(step);
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < intact.size(); ++i) {
    // Without a manifest it is not a checkpoint any more: what is half removed cannot be taken for
    // an intact one.
    std::filesystem::remove(folder / step_name(intact[i]) / formats::kManifestFile);
    MOESH_FAIL_POINT(half_of_the_purge);
    std::filesystem::remove_all(folder / step_name(intact[i]));
  }
  sync_folder(folder);
}

}  // namespace moesh::checkpoint
