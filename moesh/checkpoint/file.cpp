#include "moesh/checkpoint/file.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <future>
#include <mutex>
#include <system_error>
#include <vector>

#include "moesh/base/error.h"
#include "moesh/comm/launch.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"
#include "moesh/formats/manifest.h"

namespace moesh::checkpoint {

namespace {

using formats::fail_to;
using formats::file_system;

}  // namespace

formats::BlockSums write_file(const std::filesystem::path& path, std::string_view bytes) {
  formats::OutputFile file(path, formats::OutputFile::Mode::create);
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

namespace {

constexpr int kMostWorkers = 8;
constexpr std::uint64_t kBytesPerWorker = std::uint64_t{64} << 20;

}  // namespace

void share_work(std::size_t num_items, int num_threads,
                const std::function<void(std::size_t, std::size_t)>& f,
                const std::function<void()>& meanwhile) {
  if (num_threads == 1) {
    for (std::size_t i = 0; i < num_items; ++i) {
      if (meanwhile) meanwhile();
      f(i, 0);
    }
    return;
  }
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr fault;  // the first: others may follow from it
  const auto note_fault = [&] {
    next = num_items;  // no thread begins another
    const std::lock_guard lock(mutex);
    if (!fault) fault = std::current_exception();
  };
  const auto work = [&](std::size_t thread) {
    try {
      for (std::size_t i; (i = next++) < num_items;) f(i, thread);
    } catch (...) {
      note_fault();
    }
  };
  std::vector<std::future<void>> workers;
  try {
    for (int t = 0; t < num_threads; ++t)
      workers.push_back(std::async(std::launch::async, work, static_cast<std::size_t>(t)));
  } catch (const std::system_error&) {
    // The system has no more threads for us: those that there are do it, or else this one.
    if (workers.empty()) return share_work(num_items, 1, f, meanwhile);
  }
  bool looks = static_cast<bool>(meanwhile);  // until it throws: other ranks may be gone then
  for (std::future<void>& worker : workers)
    while (worker.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) try {
        if (looks) meanwhile();
      } catch (...) {
        looks = false;
        note_fault();
      }
  if (fault) std::rethrow_exception(fault);
}

int num_workers(std::uint64_t num_bytes) {
  const auto pieces =
      static_cast<int>(std::min<std::uint64_t>(kMostWorkers, num_bytes / kBytesPerWorker));
  return std::clamp(std::min(pieces, comm::cores_of_rank()), 1, kMostWorkers);
}

}  // namespace moesh::checkpoint
