#pragma once
// Which tensor goes into which file, and where. It follows only from the tensors, so that all
// ranks make the same plan, and so that the files have the same bytes whatever mesh writes them.

#include <map>
#include <string>
#include <vector>

#include "moesh/checkpoint/file.h"
#include "moesh/checkpoint/part.h"

namespace moesh::checkpoint {

/// Tensors that are saved together, and this rank's parts of the parameters that they are made of.
struct TensorSet {
  // Files are <prefix>-00001-of-00002.safetensors; or it is the name of one: x.safetensors.
  std::string prefix;
  std::vector<formats::DiskTensor> tensors;  // each with its dtype
  std::vector<TensorPart> parts;
};

struct PlannedTensor {
  const formats::DiskTensor* tensor;
  formats::Dtype dtype;
  std::uint64_t begin;  // in the file
};

struct PlannedFile {
  std::string name;
  std::vector<PlannedTensor> tensors;
  std::string header;
  std::uint64_t size = 0;  // of the whole file
};

/// Whether a prefix is the name of one file.
bool is_one_file(const std::string& prefix);
/// Files of at most `max_size` bytes of tensors (one tensor may be larger), in the order of the
/// tensors, or one file. It points into them.
std::vector<PlannedFile> plan_files(const std::string& prefix,
                                    const std::vector<formats::DiskTensor>& tensors,
                                    std::uint64_t max_size);

using PartsByName = std::map<std::string, const TensorPart*>;
PartsByName by_name(const std::vector<TensorPart>& parts);

/// Whether this rank owns any of a tensor.
bool owns_some(const PlannedTensor& tensor, const PartsByName& parts);
/// Writes this rank's part of a tensor. Threads may write different tensors at the same time, each
/// through a CheckpointFile of its own.
void write_tensor(CheckpointFile& out, const PlannedTensor& tensor, const PartsByName& parts);

}  // namespace moesh::checkpoint
