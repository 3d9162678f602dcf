#pragma once
// The small files of a model's folder that belong to whoever goes on from it, or converts it:
// tokenizer, chat template, generation config, license.

#include <filesystem>
#include <map>
#include <string>

namespace moesh::checkpoint {

/// By name, with their bytes; not those that describe the weights (config.json, the index, the
/// manifest). Nothing where there is no folder. A file that is larger than any of these is left out
/// with a warning.
std::map<std::string, std::string> read_companions(const std::filesystem::path& folder);

}  // namespace moesh::checkpoint
