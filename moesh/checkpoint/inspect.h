#pragma once
// The contents of a folder, and whether they are as they were written.

#include <filesystem>
#include <string>
#include <vector>

#include "moesh/comm/group.h"

namespace moesh::checkpoint {

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
