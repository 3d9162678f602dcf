#pragma once
// safetensors: eight bytes of header length, a JSON header, then the bytes of all tensors one
// behind the other.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/formats/file.h"

namespace moesh::formats {

/// Every type that the reference implementation knows, so that every file can be opened and listed.
enum class Dtype {
  boolean,
  u8,
  i8,
  i16,
  u16,
  i32,
  u32,
  i64,
  u64,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  f16,
  bf16,
  f32,
  f64,
  c64,
  f4,
  f6_e2m3,
  f6_e3m2
};

std::string_view name_of(Dtype dtype);  // as the format writes it: "F32"
const char* torch_name(Dtype dtype);    // as config.json does: "bfloat16"
/// Bytes of one element. F4 and F6 are refused: their elements share bytes.
std::uint64_t size_of(Dtype dtype);

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the start of the data

  bool operator==(const TensorInfo&) const = default;
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  std::uint64_t data_start = 0;      // where the data begins in the file
  std::vector<std::size_t> by_name;  // places in `tensors`, sorted by name

  /// Null if there is none of this name; does not go through all of them.
  const TensorInfo* find(std::string_view name) const;
};

/// Parses the beginning of a file of `file_size` bytes. `bytes` holds at least the header. Strict:
/// what the reference implementation refuses is refused, with the name of the tensor and what is
/// wrong with it; so is a name that comes twice.
SafetensorsHeader parse_safetensors(std::string_view bytes, std::uint64_t file_size);

/// The length and the header for these tensors, padded so that the data is aligned to 8 bytes.
/// `begin` and `end` are filled in here. Tensors of larger elements come first in the file,
/// then in the order given (which `tensors` keeps): so every tensor is aligned to its element, as
/// torch requires of a file that it maps.
std::string write_safetensors_header(std::vector<TensorInfo>& tensors,
                                     const std::map<std::string, std::string>& metadata);

/// A file that is read by range; see InputFile for which may be.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);

  const SafetensorsHeader& header() const { return header_; }
  const std::filesystem::path& path() const { return file_.path(); }
  std::uint64_t size() const { return file_.size(); }
  /// Bytes of the file from `offset`, which counts from its first byte. Threads may read at the
  /// same time.
  void read(std::uint64_t offset, std::span<std::byte> to) const { file_.read(offset, to); }

 private:
  InputFile file_;
  SafetensorsHeader header_;
};

// model.safetensors.index.json: which file of a folder holds which tensor.

constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kSingleFile = "model.safetensors";  // of a folder without an index

struct SafetensorsIndex {
  std::map<std::string, std::string>
      weight_map;                           // name of a tensor -> name of a file in the same folder
  std::optional<std::uint64_t> total_size;  // bytes of all tensors; not every index says it

  bool operator==(const SafetensorsIndex&) const = default;

  /// The files, each once, sorted.
  std::vector<std::string> files() const;
};

/// Files are names, not paths: an index cannot make anyone read outside of its folder. Further keys
/// are skipped.
SafetensorsIndex parse_safetensors_index(std::string_view text, const std::string& name);
SafetensorsIndex read_safetensors_index(const std::string& path);

std::string write_safetensors_index(const SafetensorsIndex& index);

}  // namespace moesh::formats
