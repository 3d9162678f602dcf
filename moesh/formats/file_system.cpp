#include "moesh/formats/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

namespace moesh::formats {
namespace {

std::atomic<FileSystem*> current = nullptr;

constexpr int kMaxTries = 4;

// Shells often allow 1024 open files where the system allows many more. False: it allows no more.
bool raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) {
    errno = EMFILE;
    return false;
  }
  limit.rlim_cur = limit.rlim_max;
  const bool is_raised = ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
  errno = EMFILE;
  return is_raised;
}

}  // namespace

int FileSystem::open(const Path& path, int flags) {
  const auto once = [&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0644); };
  const int file = once();
  return file < 0 && errno == EMFILE && raise_file_limit() ? once() : file;
}
void FileSystem::close(int file) { ::close(file); }
ssize_t FileSystem::read(int file, void* to, std::size_t count, std::uint64_t offset) {
  return ::pread(file, to, count, static_cast<off_t>(offset));
}
ssize_t FileSystem::write(int file, const void* from, std::size_t count, std::uint64_t offset) {
  return ::pwrite(file, from, count, static_cast<off_t>(offset));
}
ssize_t FileSystem::append(int file, const void* from, std::size_t count) {
  return ::write(file, from, count);
}
int FileSystem::reserve(int file, std::uint64_t size) {
  errno = ::posix_fallocate(file, 0, static_cast<off_t>(size));
  return errno == 0 ? 0 : -1;
}
int FileSystem::sync(int file) { return ::fsync(file); }
int FileSystem::begin_sync(int file, std::uint64_t offset, std::uint64_t size) {
  return ::sync_file_range(file, static_cast<off_t>(offset), static_cast<off_t>(size),
                           SYNC_FILE_RANGE_WRITE);
}
int FileSystem::forget_cached(int file, std::uint64_t offset, std::uint64_t size) {
  errno = ::posix_fadvise(file, static_cast<off_t>(offset), static_cast<off_t>(size),
                          POSIX_FADV_DONTNEED);
  return errno == 0 ? 0 : -1;
}
int FileSystem::lock(int file) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return ::fcntl(file, F_OFD_SETLK, &whole);
}

int FileSystem::status(const Path& path, struct stat& status) {
  return ::stat(path.c_str(), &status);
}
int FileSystem::status(int file, struct stat& status) { return ::fstat(file, &status); }
int FileSystem::link_status(const Path& path, struct stat& status) {
  return ::lstat(path.c_str(), &status);
}
int FileSystem::list(const Path& folder, std::vector<std::string>& names) {
  names.clear();
  DIR* entries = ::opendir(folder.c_str());
  if (!entries) return -1;
  errno = 0;
  while (const dirent* entry = ::readdir(entries)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  const int code = errno;
  ::closedir(entries);
  errno = code;
  return code == 0 ? 0 : -1;
}
int FileSystem::make_folder(const Path& path) { return ::mkdir(path.c_str(), 0755); }
int FileSystem::remove(const Path& path) { return ::remove(path.c_str()); }
int FileSystem::rename(const Path& from, const Path& to) {
  return ::rename(from.c_str(), to.c_str());
}
int FileSystem::exchange(const Path& a, const Path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE);
}
int FileSystem::free_bytes(const Path& folder, std::uint64_t& bytes) {
  struct statvfs status;
  if (::statvfs(folder.c_str(), &status) != 0) return -1;
  bytes = static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize;
  return 0;
}

FileSystem& file_system() {
  static FileSystem real;
  FileSystem* other = current.load();
  return other ? *other : real;
}

void set_file_system(FileSystem* other) { current = other; }

bool is_passing(int code) {
  return code == EINTR || code == EIO || code == ESTALE || code == ETIMEDOUT || code == EAGAIN;
}

bool wait_for_retry(int attempt) {
  if (attempt >= kMaxTries) return false;
  std::this_thread::sleep_for(std::chrono::milliseconds(attempt * attempt * 30));
  return true;
}

}  // namespace moesh::formats
