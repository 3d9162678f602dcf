#pragma once
// Names that come out of files which others wrote: how errors show them, and which of them may name
// a file.

#include <filesystem>
#include <string>
#include <string_view>

namespace moesh::formats {

/// In quotes for an error text: what does not print becomes \xNN (a name must not control the
/// terminal), a long one is shortened.
std::string shown(std::string_view name);

/// Throws an Error (data) unless this names a file in its own folder: not empty, no '/' nor '\', no
/// control character, no '.' in front. So no file can be outside of the folder that names it.
void check_file_name(std::string_view name);
/// The same for a file that may lie in one folder below: "optimizer/x.safetensors".
void check_file_path(std::string_view path);

// Names of the Hugging Face hub, from which moesh downloads nothing.

/// For a path to a model that is not there: what to do if it is a name of the hub, as
/// "deepseek-ai/DeepSeek-V3". `use` is what stands before the name of the folder then: "--model
/// hf:". Empty: it is not such a name.
std::string how_to_download(const std::string& path, const std::string& use = "");

/// Throws Error (config) with that where nothing is at the path.
void refuse_hub_name(const std::string& path);

/// For an error about a folder that lacks a file: "; it holds checkpoints: name one, such as
/// run/step-00000010" if that is so, else nothing.
std::string checkpoints_instead(const std::filesystem::path& folder);

}  // namespace moesh::formats
