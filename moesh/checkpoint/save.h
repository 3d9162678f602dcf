#pragma once
// Saving: all ranks write into a temporary folder, and when everything is on the disk the folder
// gets its name. At any moment, and after any crash, a folder called step-N is intact or is
// recognised as not.

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "moesh/checkpoint/plan.h"
#include "moesh/comm/group.h"
#include "moesh/formats/manifest.h"

namespace moesh::checkpoint {

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
