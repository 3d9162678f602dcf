#include "moesh/formats/output_file.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"

namespace moesh::formats {

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
  const int flags = mode == Mode::create ? O_WRONLY | O_CREAT | O_EXCL : O_WRONLY;
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
           "; see to it that nobody else writes it");
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
