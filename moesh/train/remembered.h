#pragma once
// Settings that a run must have in common with the run whose checkpoint it resumes.

#include <string>
#include <vector>

#include "moesh/config/config.h"

namespace moesh::train {

/// A line of the manifest of a checkpoint.
struct CheckpointSetting {
  std::string key, value;
  bool gives_position_its_meaning;  // else the position in the data would be one in other data
};

/// Keys that say what is trained: a run with others has other state, and cannot resume.
inline constexpr const char* kTrainedKeys[] = {"training.freeze", "lora.rank", "lora.targets",
                                               "lora.rank_pattern"};

/// `data_fingerprint` is that of the data as the run began.
std::vector<CheckpointSetting> remembered(const config::Config& config,
                                          const std::string& data_fingerprint);

/// The files of the data by their sizes and ends: enough to notice that they are others, and quick.
std::string fingerprint_of_data(const config::Config& config);

}  // namespace moesh::train
