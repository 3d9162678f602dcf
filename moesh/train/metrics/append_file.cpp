#include "moesh/train/metrics/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "moesh/base/log.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"

namespace moesh::train {

AppendFile::AppendFile(const std::filesystem::path& path)
    : path_(path), file_(formats::file_system().open(path, O_WRONLY | O_CREAT | O_APPEND)) {
  if (file_ < 0) formats::fail_at(path, "open", errno);
}

AppendFile::~AppendFile() {
  if (file_ >= 0) formats::file_system().close(file_);
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : path_(std::move(other.path_)),
      file_(std::exchange(other.file_, -1)),
      num_lost_(other.num_lost_),
      is_cut_off_(other.is_cut_off_) {}

AppendFile& AppendFile::operator=(AppendFile&& other) noexcept {
  std::swap(path_, other.path_), std::swap(file_, other.file_);
  std::swap(num_lost_, other.num_lost_), std::swap(is_cut_off_, other.is_cut_off_);
  return *this;
}

bool AppendFile::lock() {
  return formats::file_system().lock(file_) == 0 || (errno != EAGAIN && errno != EACCES);
}

bool AppendFile::has_name() const {
  struct stat opened = {}, named = {};
  if (formats::file_system().status(file_, opened) != 0) formats::fail_at(path_, "look at", errno);
  if (formats::file_system().status(path_, named) == 0)
    return opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
  if (errno != ENOENT) formats::fail_at(path_, "look at", errno);
  return false;
}

bool AppendFile::write(std::string_view bytes, std::int64_t step) {
  while (!bytes.empty()) {
    const auto count = formats::file_system().append(file_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      if (num_lost_++ == 0)
        log_warn("'", path_.string(),
                 "' cannot be written: ", count < 0 ? std::strerror(errno) : "no byte was taken",
                 "; metrics from step ", step, " on are lost until it can");
      return false;
    }
    bytes.remove_prefix(static_cast<std::size_t>(count));
    is_cut_off_ = true;
  }
  is_cut_off_ = false;
  return true;
}

void AppendFile::write_line(const std::string& line, std::int64_t step) {
  write(is_cut_off_ ? "\n" + line : line, step);
}

void AppendFile::finish() {
  if (num_lost_ > 0) log_warn("'", path_.string(), "': ", num_lost_, " lines could not be written");
}

}  // namespace moesh::train
