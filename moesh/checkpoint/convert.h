#pragma once
// From one folder of a model to another, tensor by tensor: no model in memory.

#include <filesystem>
#include <optional>

#include "moesh/formats/disk.h"

namespace moesh::checkpoint {

struct ConvertOptions {
  std::optional<formats::ExpertLayout> layout = {};  // else as it was
  std::optional<formats::Dtype> dtype = {};          // else as it was, tensor by tensor
  std::uint64_t max_shard_size = 5'000'000'000;
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
