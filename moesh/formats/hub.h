#pragma once
// Names of the Hugging Face hub, from which moesh downloads nothing.

#include <string>

namespace moesh::formats {

/// For a path to a model that is not there: what to do if it is a name of the hub, as
/// "deepseek-ai/DeepSeek-V3". `use` is what stands before the name of the folder then: "--model
/// hf:". Empty: it is not such a name.
std::string how_to_download(const std::string& path, const std::string& use = "");

/// Throws Error (config) with that where nothing is at the path.
void refuse_hub_name(const std::string& path);

}  // namespace moesh::formats
