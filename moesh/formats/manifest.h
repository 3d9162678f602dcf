#pragma once
// moesh.json, the manifest of a checkpoint: what it is, and size and checksums of every other file
// in its folder. It is written last; its first line is a checksum of the rest, so that no byte of a
// checkpoint changes unnoticed.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/formats/checksum.h"

namespace moesh::formats {

constexpr const char* kManifestFile = "moesh.json";

struct ManifestFile {
  std::string name;  // "x.safetensors" or "optimizer/x.safetensors"
  std::uint64_t size = 0;
  std::vector<std::uint64_t> blocks;  // the checksum of each, see kBlockBytes

  bool operator==(const ManifestFile&) const = default;
};

struct Manifest {
  std::int64_t step = 0;    // optimizer steps taken
  std::string model, size;  // "deepseek_v3", "tiny"
  std::string mesh;         // that wrote it, as --mesh takes it
  std::int64_t seed = 0;
  std::int64_t data_position = 0;  // samples taken from the global order
  std::map<std::string, std::string> extra;
  std::vector<ManifestFile> files;

  bool operator==(const Manifest&) const = default;

  /// Null if there is none of this name.
  const ManifestFile* find(std::string_view name) const;
};

std::string write_manifest(const Manifest& manifest);
/// `name` is what errors (data) call the text. A file that is listed twice, or is outside of the
/// folder, is refused.
Manifest parse_manifest(std::string_view text, const std::string& name);
/// The manifest of a checkpoint's folder.
Manifest read_manifest(const std::string& folder);
/// The same; nothing where the folder has none.
std::optional<Manifest> find_manifest(const std::filesystem::path& folder);

/// Size and checksums of a file that was written: `name` in `folder`. It is read back, and throws
/// Error (storage) unless its bytes are those of which `written` has the sums.
ManifestFile hash_file(const std::string& folder, const std::string& name,
                       const BlockSums& written);
/// Throws an Error (data) that names file and bytes, unless `bytes` are block number `index` of the
/// file, complete and unchanged.
void check_block(const ManifestFile& file, std::uint64_t index, std::span<const std::byte> bytes);
/// The same for the file on disk: its size, and every block for which `wants`, which is asked
/// before each is read, says so; without it, all of them.
void check_file(const std::string& folder, const ManifestFile& file,
                const std::function<bool(std::uint64_t index)>& wants = {});

}  // namespace moesh::formats
