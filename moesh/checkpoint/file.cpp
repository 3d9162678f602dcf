#include "moesh/checkpoint/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "moesh/base/error.h"

namespace moesh::checkpoint {
namespace {

[[noreturn]] void fail_at(const std::filesystem::path& path, const char* what, int code) {
  throw Error(ErrorKind::data,
              detail::concat("cannot ", what, " '", path.string(), "': ", std::strerror(code),
                             "; choose a checkpoint.folder that can be written and has room"));
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& path, Mode mode) : path_(path) {
  const int flags = mode == Mode::create ? O_WRONLY | O_CREAT | O_EXCL : O_WRONLY;
  descriptor_ = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail(mode == Mode::create ? "create" : "open", errno);
}

OutputFile::~OutputFile() { ::close(descriptor_); }

void OutputFile::reserve(std::uint64_t size) {
  if (size == 0) return;
  const int code = ::posix_fallocate(descriptor_, 0, static_cast<off_t>(size));
  if (code != 0) fail("reserve room for", code);
}

void OutputFile::write(std::uint64_t offset, std::string_view bytes) {
  while (!bytes.empty()) {
    const auto written =
        ::pwrite(descriptor_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("write", written < 0 ? errno : EIO);
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void OutputFile::sync() {
  if (::fsync(descriptor_) != 0) fail("flush", errno);
}

void OutputFile::fail(const char* what, int code) const { fail_at(path_, what, code); }

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  OutputFile file(path, OutputFile::Mode::create);
  file.write(0, bytes);
  file.sync();
}

void sync_folder(const std::filesystem::path& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) fail_at(path, "open", errno);
  const int result = ::fsync(folder), code = errno;
  ::close(folder);
  if (result != 0) fail_at(path, "flush", code);
}

void make_folder(const std::filesystem::path& path) {
  std::error_code failed;
  std::filesystem::create_directories(path, failed);
  if (failed) fail_at(path, "create", failed.value());
}

void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  std::error_code failed;
  std::filesystem::rename(from, to, failed);
  if (failed) fail_at(to, "rename a folder to", failed.value());
}

bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS) fail_at(b, "rename a folder to", errno);
  return false;
}

}  // namespace moesh::checkpoint
