#pragma once
// Saving a checkpoint: the plan of its files, the blocks that are read back, and the folder that
// gets its name last.

#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/part.h"
#include "moesh/comm/group.h"
#include "moesh/formats/file.h"
#include "moesh/formats/manifest.h"
#include "moesh/formats/safetensors.h"

namespace moesh::checkpoint {

// Which tensor goes into which file, and where. It follows only from the tensors, so that all
// ranks make the same plan, and so that the files have the same bytes whatever mesh writes them.

/// Tensors that are saved together, and this rank's parts of the parameters that they are made of.
struct TensorSet {
  // Files are <prefix>-00001-of-00002.safetensors; or it is the name of one: x.safetensors.
  std::string prefix;
  std::vector<formats::DiskTensor> tensors;  // each with its dtype
  std::vector<TensorPart> parts;
};

struct PlannedTensor {
  const formats::DiskTensor* tensor;
  formats::Dtype dtype;
  std::uint64_t begin;  // in the file
};

struct PlannedFile {
  std::string name;
  std::vector<PlannedTensor> tensors;
  std::string header;
  std::uint64_t size = 0;  // of the whole file
};

/// Whether a prefix is the name of one file.
bool is_one_file(const std::string& prefix);
/// Files of at most `max_size` bytes of tensors (one tensor may be larger), in the order of the
/// tensors, or one file. It points into them.
std::vector<PlannedFile> plan_files(const std::string& prefix,
                                    const std::vector<formats::DiskTensor>& tensors,
                                    std::uint64_t max_size);

/// Adds the tensors of a file to an index that has a total size.
void add_to(formats::SafetensorsIndex& index, const PlannedFile& file);

using PartsByName = std::map<std::string, const TensorPart*>;
PartsByName by_name(const std::vector<TensorPart>& parts);

/// Whether this rank owns any of a tensor.
bool owns_some(const PlannedTensor& tensor, const PartsByName& parts);
/// Writes this rank's part of a tensor. Threads may write different tensors at the same time, each
/// through a formats::OutputFile of its own.
void write_tensor(formats::OutputFile& out, const PlannedTensor& tensor, const PartsByName& parts);

// The blocks of all files of a save, from the first byte that is written until each was read back
// and hashed. A block that one rank has written whole is read back while others are written.

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

// Saving: all ranks write into a temporary folder, and when everything is on the disk the folder
// gets its name. At any moment, and after any crash, a folder called step-N is intact or is
// recognised as not.

/// The data of a checkpoint. The tensors are the same on every rank, the parts are this rank's own;
/// the texts are taken from rank 0.
struct Snapshot {
  std::vector<TensorSet>
      sets;  // the first are the weights, which get an index if they may be several files
  std::map<std::string, std::string> texts;  // small files by name: config.json
  formats::Manifest manifest;                // without the files
};

struct SaveOptions {
  std::filesystem::path folder;  // of all checkpoints of the run
  std::uint64_t max_shard_size = 5'000'000'000;
  std::int64_t keep_latest = 0;  // older ones are removed when the new one is intact; 0: none is
  std::set<std::int64_t> known = {};    // steps that the run has found or saved: no other is purged
  std::set<std::int64_t> damaged = {};  // of those, the ones that it may replace
  int num_threads = 0;  // of this rank that write and read back; 0: by what there is to do
};

/// Every rank of the group calls it. What was written is read back, past the memory of the system
/// where that is possible, and compared with what was to be written. If any rank fails, all throw,
/// and what was there before is as it was. A checkpoint of this or a later step which the run does
/// not know is an Error (storage): another run is at work.
std::filesystem::path save(const Snapshot& snapshot, const SaveOptions& options,
                           comm::Group& group);

/// The bytes of the files that `save` will write, but for the manifest.
std::uint64_t planned_bytes(const Snapshot& snapshot, const SaveOptions& options);

/// The parts copied to the host, where training does not change them.
Snapshot copied(const Snapshot& snapshot);

}  // namespace moesh::checkpoint
