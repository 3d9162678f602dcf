#include "moesh/formats/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "moesh/formats/file_system.h"

namespace moesh::formats {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

std::string read_file(const std::string& path, ErrorKind kind, std::uint64_t max_size) {
  try {
    return InputFile(path).read_all(max_size);
  } catch (const Error& e) {
    throw Error(e.kind() == ErrorKind::data ? kind : e.kind(), e.what());
  }
}

void fail_at(const std::filesystem::path& path, const char* what, int code) {
  const bool is_name = code == ENOENT || code == ENOTDIR || code == EISDIR || code == ELOOP ||
                       code == ENAMETOOLONG || code == ENXIO || code == EEXIST;
  throw Error(is_name ? ErrorKind::data : ErrorKind::storage,
              detail::concat("cannot ", what, " '", path.string(), "': ", std::strerror(code)));
}

bool exists(const std::filesystem::path& path) {
  struct stat status;
  if (retried([&] { return file_system().status(path, status); }) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) fail_at(path, "look at", errno);
  return false;
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  if (retried([&] { return file_system().list(folder, names); }) != 0) {
    if (errno != ENOENT) fail_at(folder, "list", errno);
    names.clear();
  }
  std::sort(names.begin(), names.end());
  return names;
}

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a pipe waits for its writer; reads of a regular file do not heed
  // it.
  descriptor_ = retried([&] { return file_system().open(path_, O_RDONLY | O_NONBLOCK); });
  MOESH_CHECK(descriptor_ >= 0 || errno != ENOENT, ErrorKind::data, "cannot read ", path_.string(),
              ": ", std::strerror(errno),
              "; check the name, which is relative to the folder where the program was started");
  if (descriptor_ < 0) fail_at(path_, "read", errno);
  struct stat status;
  const bool known = ::fstat(descriptor_, &status) == 0;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    return;
  }
  const char* reason = known ? kind_of(status.st_mode) : "of no known kind";
  file_system().close(descriptor_);  // no destructor runs for what was never made
  throw Error(ErrorKind::data, detail::concat("cannot read ", path_.string(), ": it is ", reason,
                                              "; name a regular file"));
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) file_system().close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

void InputFile::read(std::uint64_t offset, std::span<std::byte> to) const {
  MOESH_CHECK(offset <= size_ && to.size() <= size_ - offset, ErrorKind::data, "cannot read ",
              to.size(), " bytes of ", path_.string(), " from byte ", offset, ": it has ", size_);
  while (!to.empty()) {
    const ssize_t count =
        retried([&] { return file_system().read(descriptor_, to.data(), to.size(), offset); });
    if (count < 0) fail_at(path_, "read", errno);
    MOESH_CHECK(count > 0, ErrorKind::data, path_.string(), " ends at byte ", offset, " and had ",
                size_, " when it was opened: something else writes to it");
    offset += static_cast<std::uint64_t>(count);
    to = to.subspan(static_cast<std::size_t>(count));
  }
}

void InputFile::forget_cached() const { file_system().forget_cached(descriptor_); }

std::string InputFile::read_all(std::uint64_t max_size) const {
  MOESH_CHECK(size_ <= max_size, ErrorKind::data, path_.string(), " has ", size_,
              " bytes; such a file has at most ", max_size);
  std::string bytes(size_, '\0');
  read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

}  // namespace moesh::formats
