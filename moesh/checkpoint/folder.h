#pragma once
// The folder of a run's checkpoints: step-00000123, and what a save in progress has written.

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "moesh/formats/manifest.h"

namespace moesh::checkpoint {

std::string step_name(std::int64_t step);       // "step-00000123"
std::string temporary_name(std::int64_t step);  // while it is written
std::string replaced_name(std::int64_t step);   // one that gives way to another of the same step

/// The steps for which there is a folder, intact or not, in ascending order.
std::vector<std::int64_t> saved_steps(const std::filesystem::path& folder);

/// The manifest of a checkpoint whose files are all there with their sizes; throws Error (data)
/// which says what is wrong. The content of the files is checked when it is read.
formats::Manifest read_intact_manifest(const std::filesystem::path& checkpoint);
bool is_intact(const std::filesystem::path& checkpoint);

/// Removes what an interrupted save has left.
void remove_temporary(const std::filesystem::path& folder);
/// Of the intact checkpoints up to `newest`, which is one, the last `keep` stay. Later ones are
/// not touched: a run that went back to an older checkpoint has not judged them.
void purge(const std::filesystem::path& folder, std::int64_t newest, std::int64_t keep);

}  // namespace moesh::checkpoint
