#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace moesh::checkpoint {

/// What is in a folder of a model: who wrote it, when in the run, its files and tensors.
std::string inspect(const std::filesystem::path& folder);

/// A sentence for each file that is missing, or has another size or other bytes than the manifest
/// says, and for a manifest that cannot be one. Throws Error (storage) where something cannot be
/// read.
std::vector<std::string> find_damaged_files(const std::filesystem::path& folder);

/// Compares every byte with the manifest; a sentence for each file that is not as it was written,
/// for each that moesh did not write, and where the folder has the name of another step. Throws
/// Error (storage) where something cannot be read.
std::vector<std::string> find_damage(const std::filesystem::path& folder);

}  // namespace moesh::checkpoint
