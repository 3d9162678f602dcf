#include "moesh/formats/file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/formats/file_system.h"

namespace moesh::formats {

namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

// An open file that is closed, however this ends.
struct Open {
  ~Open() {
    if (descriptor >= 0) file_system().close(descriptor);
  }
  int descriptor;
};

// All that is written to a pipe until its last writer closes it. A pipe without a writer
// is waited for like one that is slow.
std::string read_pipe(int pipe, const std::string& path, std::uint64_t max_size, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::milliseconds(std::llround(1000 * seconds));
  std::string text, block(1 << 16, '\0');
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    struct pollfd wanted = {.fd = pipe, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&wanted, 1, static_cast<int>(std::max<std::int64_t>(0, left.count())));
    MOESH_CHECK(ready != 0, ErrorKind::data, "cannot read ", path, ": it is a pipe, and ",
                text.empty() ? "nothing was written to it" : "its writer did not close it",
                " within ", seconds, " s; name a regular file");
    const auto count = ready < 0 ? -1 : ::read(pipe, block.data(), block.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) fail_at(path, "read", errno);
    if (count == 0) return text;
    text.append(block, 0, static_cast<std::size_t>(count));
    MOESH_CHECK(text.size() <= max_size, ErrorKind::data, path, " has more than ", max_size,
                " bytes; such a file has at most ", max_size);
  }
}

}  // namespace

std::string read_file_or_pipe(const std::string& path, ErrorKind kind, std::uint64_t max_size,
                              double seconds) {
  struct stat status;
  if (file_system().status(path, status) != 0 || !S_ISFIFO(status.st_mode))
    return read_file(path, kind, max_size);
  try {
    const Open pipe{file_system().open(path, O_RDONLY | O_NONBLOCK)};
    if (pipe.descriptor < 0) fail_at(path, "read", errno);
    return read_pipe(pipe.descriptor, path, max_size, seconds);
  } catch (const Error& e) {
    throw Error(e.kind() == ErrorKind::data ? kind : e.kind(), e.what());
  }
}

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
  std::string cure;
  if (code == EMFILE) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    cure = detail::concat("; a process may have ", limit.rlim_max,
                          " open at once here (ulimit -Hn): raise that limit, or open fewer");
  }
  throw Error(
      is_name ? ErrorKind::data : ErrorKind::storage,
      detail::concat("cannot ", what, " '", path.string(), "': ", std::strerror(code), cure));
}

namespace {

using Status = int (FileSystem::*)(const FileSystem::Path&, struct stat&);

// Nothing where the file system says that there is nothing.
std::optional<mode_t> mode_of(const std::filesystem::path& path, Status look) {
  struct stat status;
  if (retried([&] { return (file_system().*look)(path, status); }) == 0) return status.st_mode;
  if (errno != ENOENT && errno != ENOTDIR) fail_at(path, "look at", errno);
  return std::nullopt;
}

}  // namespace

bool exists(const std::filesystem::path& path) {
  return mode_of(path, &FileSystem::status).has_value();
}

bool is_folder(const std::filesystem::path& path) {
  return S_ISDIR(mode_of(path, &FileSystem::status).value_or(0));
}

bool is_own_folder(const std::filesystem::path& path) {
  return S_ISDIR(mode_of(path, &FileSystem::link_status).value_or(0));
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

void InputFile::forget_cached(std::uint64_t offset, std::uint64_t size) const {
  file_system().forget_cached(descriptor_, offset, size);
}

std::string InputFile::read_all(std::uint64_t max_size) const {
  MOESH_CHECK(size_ <= max_size, ErrorKind::data, path_.string(), " has ", size_,
              " bytes; such a file has at most ", max_size);
  std::string bytes(size_, '\0');
  read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

void fail_to(const char* what, const std::filesystem::path& path, int code,
             const std::string& cure) {
  try {
    fail_at(path, what, code);
  } catch (const Error& e) {
    throw Error(ErrorKind::storage, detail::concat(e.what(), "; ", cure));
  }
}

OutputFile::OutputFile(const std::filesystem::path& path, Mode mode, std::string cure)
    : path_(path), cure_(std::move(cure)) {
  const int flags = mode == Mode::create           ? O_WRONLY | O_CREAT | O_EXCL
                    : mode == Mode::open_or_create ? O_WRONLY | O_CREAT
                                                   : O_WRONLY;
  descriptor_ = file_system().open(path, flags);
  if (descriptor_ < 0) fail_to(mode == Mode::create ? "create" : "open", path_, errno, cure_);
}

OutputFile::~OutputFile() { file_system().close(descriptor_); }

void OutputFile::reserve(std::uint64_t size) {
  if (size > 0 && file_system().reserve(descriptor_, size) != 0)
    fail_to("reserve room for", path_, errno, cure_);
}

void OutputFile::write(std::uint64_t offset, std::string_view bytes) {
  sums_.add(offset, bytes);
  while (!bytes.empty()) {
    const auto written = file_system().write(descriptor_, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_to("write", path_, written < 0 ? errno : EIO, cure_);
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void OutputFile::begin_sync(std::uint64_t offset, std::uint64_t size) {
  file_system().begin_sync(descriptor_, offset, size);
}

void OutputFile::sync() {
  if (file_system().sync(descriptor_) != 0) fail_to("flush", path_, errno, cure_);
}

bool OutputFile::lock() {
  if (file_system().lock(descriptor_) == 0) return true;
  const int code = errno;
  if (code == EAGAIN || code == EACCES) return false;
  log_warn("'", path_.string(), "' cannot be locked: ", std::strerror(code),
           "; make sure that nothing else writes to it");
  return true;
}

bool OutputFile::has_its_name() const {
  struct stat opened, named;
  return file_system().status(descriptor_, opened) == 0 &&
         file_system().status(path_, named) == 0 && opened.st_dev == named.st_dev &&
         opened.st_ino == named.st_ino;
}

void OutputFile::go_on_after(std::uint64_t size) {
  const InputFile written(path_);
  std::string bytes;
  for (std::uint64_t offset = 0; offset < size; offset += bytes.size()) {
    bytes.resize(std::min(kBlockBytes, size - offset));
    written.read(offset, std::as_writable_bytes(std::span(bytes)));
    sums_.add(offset, bytes);
  }
}

}  // namespace moesh::formats
