#pragma once
// The small files of a model's folder that belong to whoever goes on from it, or converts it:
// tokenizer, chat template, generation config, license.

#include <filesystem>
#include <map>
#include <string>

namespace moesh::checkpoint {

/// By name, with their bytes; not those that describe the weights (config.json, the index, the
/// manifest). Nothing where the folder does not exist. Where the folder has a manifest they are
/// compared with it. A file that is damaged, or larger than any of these, is left out with a
/// warning.
std::map<std::string, std::string> read_companions(const std::filesystem::path& folder);

/// A config.json with the ids that another one has for the tokens which begin, end and pad a text.
/// They are nothing to a model's numbers, and whoever generates with it needs them.
std::string with_token_ids(const std::string& config_json, const std::string& of);

}  // namespace moesh::checkpoint
