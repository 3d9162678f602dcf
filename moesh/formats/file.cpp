#include "moesh/formats/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

namespace moesh::formats {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

std::string read_file(const std::string& path, ErrorKind kind) {
  std::error_code ignored;
  MOESH_CHECK(!std::filesystem::is_directory(path, ignored), kind, "cannot read ", path,
              ": it is a folder; name a file");
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  MOESH_CHECK(in.is_open(), kind, "cannot read ", path, ": ",
              errno ? std::strerror(errno) : "it does not open",
              "; check the name, which is relative to the folder where the program was started");
  std::string text;
  for (char buffer[1 << 16]; in.read(buffer, sizeof buffer), in.gcount() > 0;)
    text.append(buffer, static_cast<std::size_t>(in.gcount()));
  MOESH_CHECK(!in.bad(), kind, "cannot read ", path, " to its end: ", std::strerror(errno));
  return text;
}

InputFile::InputFile(std::filesystem::path path) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a pipe waits for its writer; reads of a regular file do not heed
  // it.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  MOESH_CHECK(descriptor_ >= 0, ErrorKind::data, "cannot read ", path_.string(), ": ",
              std::strerror(errno),
              "; check the name, which is relative to the folder where the program was started");
  struct stat status;
  const bool known = ::fstat(descriptor_, &status) == 0;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<std::uint64_t>(status.st_size);
    return;
  }
  const char* reason = known ? kind_of(status.st_mode) : "of no known kind";
  ::close(descriptor_);  // no destructor runs for what was never made
  throw Error(ErrorKind::data, detail::concat("cannot read ", path_.string(), ": it is ", reason,
                                              "; name a regular file"));
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_) {}

void InputFile::read(std::uint64_t offset, std::span<std::byte> to) const {
  MOESH_CHECK(offset <= size_ && to.size() <= size_ - offset, ErrorKind::data, "cannot read ",
              to.size(), " bytes of ", path_.string(), " from byte ", offset, ": it has ", size_);
  while (!to.empty()) {
    const ssize_t count = ::pread(descriptor_, to.data(), to.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    MOESH_CHECK(count >= 0, ErrorKind::data, "cannot read ", path_.string(), " at byte ", offset,
                ": ", std::strerror(errno));
    MOESH_CHECK(count > 0, ErrorKind::data, path_.string(), " ends at byte ", offset, " and had ",
                size_, " when it was opened: something else writes to it");
    offset += static_cast<std::uint64_t>(count);
    to = to.subspan(static_cast<std::size_t>(count));
  }
}

std::string InputFile::read_all(std::uint64_t max_size) const {
  MOESH_CHECK(size_ <= max_size, ErrorKind::data, path_.string(), " has ", size_,
              " bytes; such a file has at most ", max_size);
  std::string bytes(size_, '\0');
  read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

}  // namespace moesh::formats
