#include "moesh/checkpoint/file.h"

#include <fcntl.h>

#include <cerrno>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/manifest.h"

namespace moesh::checkpoint {
namespace {

using formats::file_system;

// What cannot be written is never damage: the disk or its rights are in the way.
[[noreturn]] void fail_to(const char* what, const std::filesystem::path& path, int code) {
  try {
    formats::fail_at(path, what, code);
  } catch (const Error& e) {
    throw Error(ErrorKind::storage,
                detail::concat(e.what(), "; choose a folder that can be written and has room"));
  }
}

}  // namespace

OutputFile::OutputFile(const std::filesystem::path& path, Mode mode) : path_(path) {
  const int flags = mode == Mode::create ? O_WRONLY | O_CREAT | O_EXCL : O_WRONLY;
  descriptor_ = file_system().open(path, flags);
  if (descriptor_ < 0) fail_to(mode == Mode::create ? "create" : "open", path_, errno);
}

OutputFile::~OutputFile() { file_system().close(descriptor_); }

void OutputFile::reserve(std::uint64_t size) {
  if (size > 0 && file_system().reserve(descriptor_, size) != 0)
    fail_to("reserve room for", path_, errno);
}

void OutputFile::write(std::uint64_t offset, std::string_view bytes) {
  sums_.add(offset, bytes);
  while (!bytes.empty()) {
    const auto written = file_system().write(descriptor_, bytes.data(), bytes.size(), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_to("write", path_, written < 0 ? errno : EIO);
    bytes.remove_prefix(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void OutputFile::sync() {
  if (file_system().sync(descriptor_) != 0) fail_to("flush", path_, errno);
}

formats::BlockSums write_file(const std::filesystem::path& path, std::string_view bytes) {
  OutputFile file(path, OutputFile::Mode::create);
  file.write(0, bytes);
  file.sync();
  return file.sums();
}

void sync_folder(const std::filesystem::path& path) {
  const int folder = file_system().open(path, O_RDONLY | O_DIRECTORY);
  if (folder < 0) fail_to("open", path, errno);
  const int result = file_system().sync(folder), code = errno;
  file_system().close(folder);
  if (result != 0) fail_to("flush", path, code);
}

void make_folders(const std::filesystem::path& path) {
  if (path.empty()) return;
  struct stat status;
  if (file_system().status(path, status) == 0) {
    if (!S_ISDIR(status.st_mode)) fail_to("create", path, ENOTDIR);
    return;
  }
  if (errno != ENOENT) fail_to("create", path, errno);
  if (path.has_parent_path() && path.parent_path() != path) make_folders(path.parent_path());
  if (file_system().make_folder(path) != 0 && errno != EEXIST) fail_to("create", path, errno);
}

void make_new_folder(const std::filesystem::path& path) {
  if (file_system().make_folder(path) == 0) return;
  MOESH_CHECK(errno != EEXIST, ErrorKind::storage, "'", path.string(),
              "' is in the way, and moesh did not make it; move it away");
  fail_to("create", path, errno);
}

void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (file_system().rename(from, to) != 0) fail_to("rename a folder to", to, errno);
}

bool exchange_folders(const std::filesystem::path& a, const std::filesystem::path& b) {
  if (file_system().exchange(a, b) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS) fail_to("rename a folder to", b, errno);
  return false;
}

void remove_contents(const std::filesystem::path& path, const std::set<std::string>& kept) {
  for (const bool is_last : {false, true})
    for (const auto& name : formats::names_in(path))
      if ((name == formats::kManifestFile) == is_last && !kept.contains(name))
        remove_folder(path / name);
}

void remove_folder(const std::filesystem::path& path) {
  if (formats::is_own_folder(path)) remove_contents(path);
  if (file_system().remove(path) != 0 && errno != ENOENT) fail_to("remove", path, errno);
}

}  // namespace moesh::checkpoint
