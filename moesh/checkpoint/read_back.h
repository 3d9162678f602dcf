#pragma once
// The blocks of all files of a save, from the first byte that is written until each was read back
// and hashed. A block that one rank has written whole is read back while others are written.

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/formats/file.h"
#include "moesh/formats/manifest.h"

namespace moesh::checkpoint {

/// One number for each block, the same numbers on every rank. Threads of a rank may call
/// `add_written` and `read_back` at the same time, the latter each with a Reader of its own.
class ReadBack {
 public:
  explicit ReadBack(std::filesystem::path folder) : folder_(std::move(folder)) {}

  void add_file(const std::string& name, std::uint64_t size);
  std::uint64_t num_bytes() const;

  struct Range {
    std::uint64_t begin, size;
  };
  Range range_of(std::size_t block) const;
  const std::string& file_of(std::size_t block) const;

  /// Records a write of this rank to a file. Returns the blocks of which it has now written every
  /// byte.
  std::vector<std::size_t> add_written(const std::string& file, const formats::BlockSums& sums);

  /// A thread has one file open at a time.
  struct Reader {
    std::string name = {};
    std::optional<formats::InputFile> file = {};
    std::vector<std::byte> buffer = {};
  };
  /// Reads a block from the disk, where the system can do that. It must have been flushed.
  void read_back(std::size_t block, Reader& reader);

  /// All ranks say what they wrote and read. Blocks that no rank has read back are divided among
  /// them: returns this rank's.
  std::vector<std::size_t> left_to_read(comm::Group& group);
  /// Throws Error (storage) where this rank read other values than all ranks have written.
  void check() const;
  /// All files with their hashes, when all ranks have read everything.
  std::vector<formats::ManifestFile> hashed_files(comm::Group& group) const;

 private:
  struct File {
    std::string name;
    std::uint64_t size;
    std::size_t first_block;
  };
  const File& file(std::size_t block) const;

  std::filesystem::path folder_;
  std::vector<File> files_;
  std::mutex mutex_;
  // For each block; what another rank has written or read is 0 here, until it tells.
  std::vector<std::uint64_t> written_;     // sums, see BlockSums
  std::vector<std::uint64_t> num_bytes_;   // that were written
  std::vector<std::uint64_t> found_;       // sums of what was read back
  std::vector<std::uint64_t> hashes_;      // of the same
  std::vector<std::uint64_t> times_read_;  // 0 or 1
};

}  // namespace moesh::checkpoint
