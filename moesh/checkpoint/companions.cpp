#include "moesh/checkpoint/companions.h"

#include <algorithm>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/load.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/json.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/name.h"
#include "moesh/formats/safetensors_index.h"

namespace moesh::checkpoint {
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
  std::optional<formats::Manifest> manifest;
  if (formats::exists(folder / formats::kManifestFile))
    manifest = formats::read_manifest(folder.string());
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
      // What somebody has put there since is no part of the checkpoint, and nothing is known of it.
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
