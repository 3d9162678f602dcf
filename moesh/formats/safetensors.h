#pragma once
// safetensors: eight bytes of header length, a JSON header, then the bytes of all tensors one behind the other.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moesh::formats {

enum class Dtype { boolean, u8, i8, i16, u16, i32, u32, i64, u64, f8_e4m3, f8_e5m2, f16, bf16, f32, f64 };

std::uint64_t size_of(Dtype dtype);
std::string_view name_of(Dtype dtype);  // as the format writes it: "F32"

struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the start of the data
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
  std::uint64_t data_start = 0;  // where the data begins in the file

  const TensorInfo* find(std::string_view name) const;
};

/// Parses the beginning of a file of `file_size` bytes. `bytes` holds at least the header. Strict: what the reference
/// implementation refuses is refused, with the name of the tensor and what is wrong with it.
SafetensorsHeader parse_safetensors(std::string_view bytes, std::uint64_t file_size);

/// The length and the header for these tensors, padded so that the data is aligned to 8 bytes. `begin` and `end` are filled in
/// here, in the order given.
std::string write_safetensors_header(std::vector<TensorInfo>& tensors, const std::map<std::string, std::string>& metadata);

/// A file that is read by range.
class SafetensorsFile {
 public:
  /// A regular file, or a symlink to one.
  explicit SafetensorsFile(std::filesystem::path path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;

  const SafetensorsHeader& header() const { return header_; }
  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  /// Bytes of the file from `offset`, which counts from its first byte. Thread-safe.
  void read(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
  SafetensorsHeader header_;
};

}  // namespace moesh::formats
