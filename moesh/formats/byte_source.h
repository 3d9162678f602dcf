#pragma once
// Bytes one after the other, from a file (compressed or not) or from standard input.

#include <cstdint>
#include <memory>
#include <string>

namespace moesh::formats {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  /// Reads up to `count` bytes and returns how many; 0 at the end.
  virtual std::size_t read(char* to, std::size_t count) = 0;
  /// Bytes of the file that were taken, as they lie in it.
  virtual std::uint64_t position() const = 0;
};

/// "-" is standard input; what ends in .gz or .zst is unpacked; `first` bytes of a file are left
/// out. Errors (data, storage) name the path.
std::unique_ptr<ByteSource> open_bytes(const std::string& path, std::uint64_t first = 0);

std::unique_ptr<ByteSource> gunzipped(std::unique_ptr<ByteSource> from, const std::string& name);
std::unique_ptr<ByteSource> unzstd(std::unique_ptr<ByteSource> from, const std::string& name);

/// Lines without their ends. One that is longer than `max_bytes` is taken as far as that.
class LineReader {
 public:
  LineReader(std::unique_ptr<ByteSource> from, std::size_t max_bytes);
  /// False at the end. `size` is that of the whole line.
  bool next(std::string& line, std::uint64_t& size);
  std::uint64_t position() const { return from_->position(); }
  /// Whether the last line had an end.
  bool ended_with_newline() const { return ended_; }

 private:
  std::unique_ptr<ByteSource> from_;
  std::size_t max_bytes_;
  bool ended_ = false;
  std::string buffer_;
  std::size_t at_ = 0;
};

}  // namespace moesh::formats
