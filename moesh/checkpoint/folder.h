#pragma once
// The folder of a run's checkpoints: step-00000123, and what a save has under way.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "moesh/formats/manifest.h"

namespace moesh::checkpoint {

std::string step_name(std::int64_t step);       // "step-00000123"
std::string temporary_name(std::int64_t step);  // while it is written
std::string replaced_name(std::int64_t step);   // one that gives way to another of the same step

/// The steps for which there is a folder, whole or not, in ascending order.
std::vector<std::int64_t> saved_steps(const std::filesystem::path& folder);

/// The manifest of a checkpoint whose files are all there with their sizes; throws Error (data)
/// which says what is wrong. The content of the files is checked when it is read.
formats::Manifest read_whole_manifest(const std::filesystem::path& checkpoint);
bool is_whole(const std::filesystem::path& checkpoint);

/// What a save that was cut short has left.
void remove_temporary(const std::filesystem::path& folder);
/// Of the whole checkpoints up to `newest`, which is whole, the last `keep` stay. Later ones are
/// not touched: a run that went back to an older checkpoint has not judged them.
void purge(const std::filesystem::path& folder, std::int64_t newest, std::int64_t keep);

}  // namespace moesh::checkpoint
