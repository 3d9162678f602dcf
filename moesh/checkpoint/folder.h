#pragma once
// The folder of a run's checkpoints: step-00000123, and what a save in progress has written.

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "moesh/comm/group.h"
#include "moesh/formats/file.h"
#include "moesh/formats/manifest.h"

namespace moesh::checkpoint {

std::string step_name(std::int64_t step);       // "step-00000123"
std::string temporary_name(std::int64_t step);  // while it is written
std::string replaced_name(std::int64_t step);   // one that gives way to another of the same step
std::string purged_name(std::int64_t step);     // while it is removed

/// Key in `extra` of a manifest: the number of skipped steps just before the checkpoint.
constexpr const char* kSkippedSteps = "skipped_steps";

/// The steps for which there is a folder, intact or not, in ascending order. None where there is no
/// folder; throws Error (storage) where it cannot be listed.
std::vector<std::int64_t> saved_steps(const std::filesystem::path& folder);

/// The manifest of a checkpoint whose files are all there with their sizes; throws Error (data)
/// which says what is wrong, or Error (storage) where the system cannot say. The content of the
/// files is checked when it is read.
formats::Manifest read_intact_manifest(const std::filesystem::path& checkpoint);
/// Throws Error (storage) where the system cannot say.
bool is_intact(const std::filesystem::path& checkpoint);

/// Removes the folders that an interrupted save or purge has left: those with a manifest (even an
/// empty one), and empty ones. Anything else with such a name is not moesh's, and stays.
void remove_temporary(const std::filesystem::path& folder);
/// Keeps the last `keep` of the intact checkpoints up to `newest`, which is one, and the last one
/// that is proven: a step after it had finite gradients, which is not known of the newest. Only
/// those of `known` are ever removed: the run has read or written them. Later ones are not touched:
/// a run that went back to an older checkpoint has not judged them.
void purge(const std::filesystem::path& folder, std::int64_t newest, std::int64_t keep,
           const std::set<std::int64_t>& known);

/// While it lives, no other run works in the folder, which is made where it is missing. Throws
/// Error (config) which names the holder where another one does. The lock is one of an open file
/// description: it is gone when the process is, however that ends. On a file system without locks
/// it warns and holds nothing.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);

 private:
  formats::OutputFile file_;
};

/// The file that is locked. It stays: to remove it would open a gap between two runs.
constexpr const char* kLockFile = ".lock";

// The small files of a model's folder that belong to a run that starts from it, or to a conversion:
// tokenizer, chat template, generation config, license.

/// By name, with their bytes; not those that describe the weights (config.json, the index, the
/// manifest). Nothing where the folder does not exist. Where the folder has a manifest they are
/// compared with it. A file that is damaged, or larger than any of these, is left out with a
/// warning.
std::map<std::string, std::string> read_companions(const std::filesystem::path& folder);

/// A config.json with the ids of another one for the tokens that begin, end and pad a text. A model
/// computes without them, but generation needs them.
std::string with_token_ids(const std::string& config_json, const std::string& of);

// The contents of a folder, and whether they are as they were written.

/// The contents of a model's folder: which program wrote it, when in the run, its files and
/// tensors.
std::string inspect(const std::filesystem::path& folder);

/// A sentence on a file that is missing, or has another size or other bytes than the manifest says,
/// or on a manifest that cannot be one: the first that the ranks of a group find, which divide the
/// blocks of all files among them. Empty: every file is as it was written. Throws Error (storage)
/// where something cannot be read.
std::string damage_in(const std::filesystem::path& folder, comm::Group& group);

/// Compares every byte with the manifest; a sentence for each file that is not as it was written,
/// for each that moesh did not write, and where the folder has the name of another step. Throws
/// Error (storage) where something cannot be read.
std::vector<std::string> find_damage(const std::filesystem::path& folder);

}  // namespace moesh::checkpoint
