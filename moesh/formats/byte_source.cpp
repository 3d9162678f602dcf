#include "moesh/formats/byte_source.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "moesh/formats/file.h"

namespace moesh::formats {
namespace {

class FileSource : public ByteSource {
 public:
  FileSource(const std::string& path, std::uint64_t first)
      : file_(path), position_(std::min(first, file_.size())) {}
  std::size_t read(char* to, std::size_t count) override {
    count = static_cast<std::size_t>(std::min<std::uint64_t>(count, file_.size() - position_));
    file_.read(position_, std::as_writable_bytes(std::span(to, count)));
    position_ += count;
    return count;
  }
  std::uint64_t position() const override { return position_; }

 private:
  InputFile file_;
  std::uint64_t position_;
};

class StandardInput : public ByteSource {
 public:
  std::size_t read(char* to, std::size_t count) override {
    ssize_t result;
    do result = ::read(STDIN_FILENO, to, count);
    while (result < 0 && errno == EINTR);
    if (result < 0) fail_at("standard input", "read", errno);
    position_ += static_cast<std::uint64_t>(result);
    return static_cast<std::size_t>(result);
  }
  std::uint64_t position() const override { return position_; }

 private:
  std::uint64_t position_ = 0;
};

}  // namespace

std::unique_ptr<ByteSource> open_bytes(const std::string& path, std::uint64_t first) {
  if (path == "-") return std::make_unique<StandardInput>();
  auto file = std::make_unique<FileSource>(path, first);
  if (path.ends_with(".gz")) return gunzipped(std::move(file), path);
  if (path.ends_with(".zst")) return unzstd(std::move(file), path);
  return file;
}

LineReader::LineReader(std::unique_ptr<ByteSource> from, std::size_t max_bytes)
    : from_(std::move(from)), max_bytes_(max_bytes) {}

bool LineReader::next(std::string& line, std::uint64_t& size) {
  constexpr std::size_t kChunk = std::size_t{1} << 20;
  line.clear();
  size = 0;
  for (;;) {
    if (at_ == buffer_.size()) {
      buffer_.resize(kChunk);
      buffer_.resize(from_->read(buffer_.data(), kChunk));
      at_ = 0;
      if (buffer_.empty()) {
        if (size > 0) ended_ = false;
        return size > 0;
      }
    }
    const std::size_t end = buffer_.find('\n', at_);
    const std::size_t count = std::min(end, buffer_.size()) - at_;
    line.append(buffer_, at_, std::min(count, max_bytes_ - line.size()));
    size += count;
    at_ += count;
    if (end == std::string::npos) continue;
    ++at_;
    ended_ = true;
    return true;
  }
}

}  // namespace moesh::formats
