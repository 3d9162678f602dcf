#include "moesh/checkpoint/folder.h"

#include <cctype>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/load.h"
#include "moesh/formats/adapter_config.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/name.h"

namespace moesh::checkpoint {
namespace {

std::string mebibytes(std::uint64_t bytes) {
  char text[40];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

// model.layers.3.mlp.gate.weight -> model.layers.*.mlp.gate.weight: one line for the tensors of all
// layers and experts.
std::string pattern(const std::string& name) {
  std::string text;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const bool is_number =
        std::isdigit(static_cast<unsigned char>(name[i])) && (i == 0 || name[i - 1] == '.');
    std::size_t end = i;
    while (is_number && end < name.size() && std::isdigit(static_cast<unsigned char>(name[end])))
      ++end;
    if (is_number && (end == name.size() || name[end] == '.')) {
      text += '*';
      i = end - 1;
    } else {
      text += name[i];
    }
  }
  return text;
}

std::string describe_tensors(const TensorFolder& folder) {
  std::map<std::string, std::size_t> counts;
  std::uint64_t bytes = 0;
  for (const auto& [name, found] : folder.tensors()) {
    ++counts[detail::concat(printable(pattern(name)), "  ", formats::name_of(found.info->dtype),
                            " ", found.info->shape)];
    bytes += found.info->end - found.info->begin;
  }
  std::string text = detail::concat(folder.tensors().size(), " tensors, ", mebibytes(bytes), "\n");
  for (const auto& [line, count] : counts)
    text += detail::concat("  ", line, count > 1 ? detail::concat("  x ", count) : "", "\n");
  return text;
}

// Calls f(name) for every file below a folder, by its name from there.
void each_file(const std::filesystem::path& folder, const std::string& below,
               const std::function<void(const std::string&)>& f) {
  for (const auto& name : formats::names_in(folder / below)) {
    const std::string path = below.empty() ? name : below + "/" + name;
    if (formats::is_own_folder(folder / path))
      each_file(folder, path, f);
    else
      f(path);
  }
}

// Calls f, and collects what is damage of what it throws: what cannot be read may be whole.
template <class F>
void look(std::vector<std::string>& damage, const F& f) {
  try {
    f();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::data) throw;
    damage.emplace_back(e.what());
  }
}

}  // namespace

std::string inspect(const std::filesystem::path& folder) {
  MOESH_CHECK(formats::is_folder(folder), ErrorKind::config, "'", folder.string(),
              "' is not a folder; name one that holds a model or a checkpoint, such as "
              "outputs/checkpoints/step-00000100");
  std::string text = printable(folder.string()) + "\n";
  const auto manifest = formats::find_manifest(folder);
  if (formats::exists(folder / "config.json")) {
    const auto config = formats::read_json((folder / "config.json").string());
    const auto* type = config.find("model_type");
    text += detail::concat(
        "model: ", type ? printable(type->as_text("model_type")) : "unknown",
        !manifest || manifest->size.empty() ? "" : " " + printable(manifest->size), "\n");
  }
  if (manifest) {
    text += detail::concat("step: ", manifest->step, ", seed ", manifest->seed, ", ",
                           manifest->data_position, " sequences seen\n");
    if (!manifest->mesh.empty())
      text += detail::concat("written by: ", printable(manifest->mesh), "\n");
    for (const auto& [key, value] : manifest->extra)
      text += detail::concat(printable(key), ": ", printable(value), "\n");
    text += "files:\n";
    for (const auto& file : manifest->files)
      text += detail::concat("  ", printable(file.name), "  ", mebibytes(file.size), "\n");
  } else {
    text += "no moesh.json: not written by moesh, nothing to check it against\n";
  }
  text += formats::exists(folder / formats::kAdapterConfigFile)
              ? "adapter: " + describe_tensors(TensorFolder::adapter(folder))
              : "weights: " + describe_tensors(TensorFolder::weights(folder));
  if (manifest) {
    const auto state = TensorFolder::of_checkpoint(folder, *manifest, "optimizer/");
    if (!state.tensors().empty()) text += "optimizer: " + describe_tensors(state);
  }
  return text;
}

std::string damage_in(const std::filesystem::path& folder, comm::Group& group) {
  const auto size = static_cast<std::uint64_t>(group.size());
  const auto rank = static_cast<std::uint64_t>(group.rank());
  try {
    together(group, [&](const Heartbeat& heartbeat) {
      std::uint64_t number = 0;  // of a block among those of all files
      for (const auto& file : formats::read_manifest(folder.string()).files)
        formats::check_file(folder.string(), file, [&](std::uint64_t) {
          beat(heartbeat);
          return number++ % size == rank;
        });
    });
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::data) throw;
    return e.what();
  }
  return "";
}

std::vector<std::string> find_damage(const std::filesystem::path& folder) {
  std::vector<std::string> damage;
  std::optional<formats::Manifest> manifest;
  look(damage, [&] { manifest = formats::read_manifest(folder.string()); });
  if (!manifest) return damage;
  for (const auto& file : manifest->files)
    look(damage, [&] { formats::check_file(folder.string(), file); });

  const std::string name = folder.filename().string();
  if (name.starts_with("step-") && name != step_name(manifest->step))
    damage.push_back(detail::concat("'", folder.string(), "' is called ", name,
                                    ", and its manifest is of step ", manifest->step,
                                    ": it was copied or renamed"));
  each_file(folder, "", [&](const std::string& extra) {
    if (extra != formats::kManifestFile && !manifest->find(extra))
      damage.push_back(detail::concat("file ", formats::shown(extra),
                                      " is not in the manifest: moesh did not write it"));
  });
  return damage;
}

}  // namespace moesh::checkpoint
