#pragma once
#include <filesystem>

namespace moesh::checkpoint {

/// While it lives, no other run works in the folder, which is made where it is missing. Throws
/// Error (config) which names the holder where another one does. The lock is one of an open file
/// description: it is gone when the process is, however that ends. On a file system without locks
/// it warns and holds nothing.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_ = -1;
};

/// The file that is locked. It stays: to remove it would open a gap between two runs.
constexpr const char* kLockFile = ".lock";

}  // namespace moesh::checkpoint
