#include "moesh/formats/manifest.h"

#include <algorithm>
#include <filesystem>
#include <functional>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

constexpr std::int64_t kVersion = 1;

// The first line: {"checksum": "0123456789abcdef",
constexpr std::string_view kBeforeChecksum = "{\"checksum\": \"";
constexpr std::string_view kAfterChecksum = "\",\n";
constexpr std::size_t kFirstLine = kBeforeChecksum.size() + 16 + kAfterChecksum.size();

std::string first_line(std::string_view rest) {
  return detail::concat(kBeforeChecksum, checksum_text(hash_block(rest)), kAfterChecksum);
}

// Blocks are counted and files are found by name, so a manifest must be right in itself: when it is
// read, and when it is written.
void check(const Manifest& manifest) {
  MOESH_CHECK(manifest.step >= 0 && manifest.data_position >= 0, ErrorKind::data, "step ",
              manifest.step, " and data_position ", manifest.data_position,
              " must not be negative");
  std::vector<std::string_view> names;
  for (const ManifestFile& file : manifest.files) {
    check_file_path(file.name);
    MOESH_CHECK(file.name != kManifestFile, ErrorKind::data, "it lists itself, ", kManifestFile,
                ", which no checksum can cover");
    MOESH_CHECK(file.blocks.size() == num_blocks(file.size), ErrorKind::data, "file ",
                shown(file.name), " of ", file.size, " bytes has ", file.blocks.size(),
                " checksums; it must have one for every ", kBlockBytes, " bytes, ",
                num_blocks(file.size));
    names.push_back(file.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  MOESH_CHECK(twice == names.end(), ErrorKind::data, "it lists file ", shown(*twice), " twice");
}

JsonValue to_value(const ManifestFile& file) {
  JsonList blocks;
  for (const std::uint64_t checksum : file.blocks) blocks.push_back({checksum_text(checksum)});
  return {
      JsonObject{{"name", {file.name}}, {"size", {file.size}}, {"blocks", {std::move(blocks)}}}};
}

ManifestFile to_file(const JsonValue& json) {
  ManifestFile file{.name = json.at("name", "file").as_text("name"),
                    .size = json.at("size", "file").as_size("size")};
  for (const JsonValue& block : json.at("blocks", "file").as_list("blocks"))
    file.blocks.push_back(parse_checksum(block.as_text("blocks")));
  return file;
}

Manifest to_manifest(const JsonValue& json) {
  const std::int64_t version = json.at("format", "manifest").as_int("format");
  MOESH_CHECK(version == kVersion, ErrorKind::data, "it has format ", version,
              "; this moesh reads format ", kVersion, ": use the moesh that wrote it");
  Manifest manifest{.step = json.at("step", "manifest").as_int("step"),
                    .model = json.at("model", "manifest").as_text("model"),
                    .size = json.at("size", "manifest").as_text("size"),
                    .mesh = json.at("mesh", "manifest").as_text("mesh"),
                    .seed = json.at("seed", "manifest").as_int("seed"),
                    .data_position = json.at("data_position", "manifest").as_int("data_position")};
  for (const auto& [key, value] : json.at("extra", "manifest").as_object("extra"))
    manifest.extra.emplace(key, value.as_text(key));
  for (const JsonValue& file : json.at("files", "manifest").as_list("files"))
    manifest.files.push_back(to_file(file));
  check(manifest);
  return manifest;
}

// Calls f(index, bytes) for every block of a file that is wanted.
void each_block(const InputFile& file,
                const std::function<void(std::uint64_t, std::span<const std::byte>)>& f,
                const std::function<bool(std::uint64_t)>& wants = {}) {
  std::vector<std::byte> buffer(std::min(file.size(), kBlockBytes));
  for (std::uint64_t index = 0; index < num_blocks(file.size()); ++index) {
    if (wants && !wants(index)) continue;
    const std::span bytes(buffer.data(), std::min(kBlockBytes, file.size() - index * kBlockBytes));
    file.read(index * kBlockBytes, bytes);
    f(index, bytes);
  }
}

InputFile open_in(const std::string& folder, const std::string& name) {
  check_file_path(name);
  return InputFile(std::filesystem::path(folder) / name);
}

}  // namespace

const ManifestFile* Manifest::find(std::string_view name) const {
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const ManifestFile& file) { return file.name == name; });
  return found == files.end() ? nullptr : &*found;
}

std::string write_manifest(const Manifest& manifest) {
  check(manifest);
  JsonObject extra;
  for (const auto& [key, value] : manifest.extra) extra.emplace_back(key, JsonValue{value});
  JsonList files;
  for (const ManifestFile& file : manifest.files) files.push_back(to_value(file));
  const std::string text = to_json({JsonObject{{"format", {kVersion}},
                                               {"step", {manifest.step}},
                                               {"model", {manifest.model}},
                                               {"size", {manifest.size}},
                                               {"mesh", {manifest.mesh}},
                                               {"seed", {manifest.seed}},
                                               {"data_position", {manifest.data_position}},
                                               {"extra", {std::move(extra)}},
                                               {"files", {std::move(files)}}}});
  const std::string rest = text.substr(2);  // without "{\n", which the first line has
  return first_line(rest) + rest;
}

Manifest parse_manifest(std::string_view text, const std::string& name) {
  try {
    const std::string_view rest = text.substr(std::min(text.size(), kFirstLine));
    MOESH_CHECK(
        text.substr(0, kFirstLine) == first_line(rest), ErrorKind::data,
        "it does not have the checksum of its first line: it is damaged, cut off, or was changed by hand");
    return to_manifest(parse_json(text, "it"));
  } catch (const Error& e) {
    throw Error(e.kind(), detail::concat(name, ": ", e.what()));
  }
}

Manifest read_manifest(const std::string& folder) {
  const InputFile file = open_in(folder, kManifestFile);
  return parse_manifest(file.read_all(JsonLimits().max_bytes), file.path().string());
}

std::optional<Manifest> find_manifest(const std::filesystem::path& folder) {
  return formats::exists(folder / kManifestFile) ? std::optional(read_manifest(folder.string()))
                                                 : std::nullopt;
}

ManifestFile hash_file(const std::string& folder, const std::string& name,
                       const BlockSums& written) {
  const InputFile input = open_in(folder, name);
  input.forget_cached();
  ManifestFile file{.name = name, .size = input.size()};
  BlockSums found;
  each_block(input, [&](std::uint64_t index, std::span<const std::byte> bytes) {
    found.add(index * kBlockBytes, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    file.blocks.push_back(hash_block(bytes));
  });
  MOESH_CHECK(found.blocks() == written.blocks(), ErrorKind::storage, input.path().string(),
              " was read back with other bytes than were written; the disk or the memory of this "
              "machine is at fault");
  return file;
}

void check_block(const ManifestFile& file, std::uint64_t index, std::span<const std::byte> bytes) {
  MOESH_CHECK(index < file.blocks.size(), "file ", shown(file.name), " has ", file.blocks.size(),
              " blocks, not one of number ", index);
  const std::uint64_t begin = index * kBlockBytes;
  const std::uint64_t wanted = std::min(kBlockBytes, file.size - begin);
  MOESH_CHECK(bytes.size() == wanted, "block ", index, " of ", shown(file.name), " has ", wanted,
              " bytes; ", bytes.size(), " were given to check");
  MOESH_CHECK(hash_block(bytes) == file.blocks[index], ErrorKind::data, "file ", shown(file.name),
              " is damaged: bytes ", begin, " to ", begin + wanted,
              " do not have the checksum that the manifest gives; take another checkpoint");
}

void check_file(const std::string& folder, const ManifestFile& file,
                const std::function<bool(std::uint64_t index)>& wants) {
  const InputFile input = open_in(folder, file.name);
  input.forget_cached();
  MOESH_CHECK(input.size() == file.size, ErrorKind::data, "file ", shown(file.name),
              " is damaged: it has ", input.size(), " bytes, and the manifest gives ", file.size,
              "; take another checkpoint");
  const auto check = [&](std::uint64_t index, std::span<const std::byte> bytes) {
    check_block(file, index, bytes);
  };
  each_block(input, check, wants);
}

}  // namespace moesh::formats
