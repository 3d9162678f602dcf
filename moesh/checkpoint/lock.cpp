#include "moesh/checkpoint/lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "moesh/base/error.h"
#include "moesh/base/log.h"
#include "moesh/checkpoint/file.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"

namespace moesh::checkpoint {
namespace {

using formats::file_system;

// As long as the longest host name and the rest: a shorter text overwrites a longer one.
constexpr std::size_t kHolderBytes = 400;

std::string own_name() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 40> since{};
  std::strftime(since.data(), since.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  std::string text =
      detail::concat("process ", ::getpid(), " on ", host.data(), " since ", since.data());
  text.resize(kHolderBytes - 1, ' ');
  return text + '\n';
}

std::string holder(int file) {
  std::string text(kHolderBytes, ' ');
  const auto count = file_system().read(file, text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  const auto end = text.find_last_not_of(" \n");
  return end == std::string::npos ? "another process" : text.substr(0, end + 1);
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder) {
  make_folders(folder);
  const auto path = folder / kLockFile;
  descriptor_ = file_system().open(path, O_RDWR | O_CREAT);
  if (descriptor_ < 0) formats::fail_at(path, "open", errno);
  if (file_system().lock(descriptor_) != 0) {
    const int code = errno;
    const bool is_held = code == EAGAIN || code == EACCES;
    const std::string who = is_held ? holder(descriptor_) : "";
    if (is_held) file_system().close(descriptor_);  // no destructor runs for what was never made
    MOESH_CHECK(!is_held, ErrorKind::config, "'", folder.string(), "' is used by ", who,
                "; wait until that has ended, or choose another folder");
    log_warn("'", path.string(), "' cannot be locked: ", std::strerror(code),
             "; see to it that no other run saves into this folder");
    return;
  }
  // Also a probe: a folder that cannot be written is noticed before the first step.
  const std::string text = own_name();
  const auto written = file_system().write(descriptor_, text.data(), text.size(), 0);
  if (written == static_cast<ssize_t>(text.size())) return;
  const int code = written < 0 ? errno : ENOSPC;
  file_system().close(descriptor_);
  formats::fail_at(path, "write", code);
}

FolderLock::~FolderLock() { file_system().close(descriptor_); }

}  // namespace moesh::checkpoint
