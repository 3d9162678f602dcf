#pragma once
// From one folder of a model to another, tensor by tensor: no model in memory.

#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "moesh/formats/disk.h"

namespace moesh::checkpoint {

/// A LoRA adapter that becomes part of the weights: scale B A is added to each that it is for.
struct Merge {
  std::filesystem::path adapter;
  formats::DiskTable table;                            // of its tensors
  std::map<std::string, formats::LoraTerm> additions;  // by the parameter of the model
};

struct ConvertOptions {
  std::optional<formats::ExpertLayout> layout = {};  // else as it was
  std::optional<formats::Dtype> dtype = {};          // else as it was, tensor by tensor
  std::uint64_t max_shard_size = 5'000'000'000;
  std::optional<Merge> merge = {};
  // Parameters whose tensors are written in float8, each with its scales as <name>_scale_inv, a
  // float32 for each block of 128 x 128, as DeepSeek-V3 is published. None: no tensor is.
  std::set<std::string> float8 = {};
};

struct Converted {
  std::size_t num_tensors = 0, num_files = 0;
  std::uint64_t num_bytes = 0;
};

/// `to` must not exist yet; it gets its name when it is complete. Other files of the folder (a
/// tokenizer) are copied.
Converted convert(const std::filesystem::path& from, const std::filesystem::path& to,
                  const formats::ModelOnDisk& model, const ConvertOptions& options);

}  // namespace moesh::checkpoint
