#pragma once
// Weights in fewer bits with scales beside them, as some models are published. They are read as
// float32; nothing here writes them.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moesh/formats/disk.h"
#include "moesh/kernels/quantized.h"

namespace moesh::checkpoint {

class BlockFile;

/// A tensor in one of the files of a folder.
struct StoredTensor {
  BlockFile* file;
  const formats::TensorInfo* info;
};

/// A tensor that is stored as two, values and scales.
class Quantized {
 public:
  virtual ~Quantized() = default;

  /// As the model has it: name and shape; its bytes begin where those of the values do. Of type
  /// bfloat16, which is what it is published to be computed in.
  const formats::TensorInfo& info() const { return info_; }
  const kernels::Quantization& how() const { return how_; }
  /// Both of them as they are in files.
  const StoredTensor& values() const { return values_; }
  const StoredTensor& scales() const { return scales_; }
  BlockFile* file() const { return values_.file; }
  BlockFile* file_of_scales() const { return scales_.file; }
  const std::string& name_of_scales() const { return scales_.info->name; }
  virtual bool has_finite_scales() const = 0;
  /// Elements from `first` on in the order in which they are stored, which is that of
  /// stored_order(...).
  virtual void decode(std::int64_t first, std::span<float> to) const = 0;
  /// A tensor of a table with its view as the elements lie here.
  virtual formats::DiskTensor stored_order(const formats::DiskTensor& tensor) const = 0;

 protected:
  Quantized(const kernels::Quantization& how, StoredTensor values, StoredTensor scales,
            formats::TensorInfo info)
      : how_(how), values_(values), scales_(scales), info_(std::move(info)) {}

  kernels::Quantization how_;
  StoredTensor values_, scales_;
  formats::TensorInfo info_;
};

/// The quantized tensors among those of a folder (errors call it by its path):
///   name [R, C] of float8 (e4m3) and name_scale_inv, a float32 for each block (DeepSeek-V3);
///   name_blocks [E, N, G, 16] and name_scales [E, N, G] of bytes, MXFP4 (GPT-OSS): a byte holds
///   two e2m1 numbers, a group of 32 numbers has the exponent of a power of two. The model has
///   name [E, 32 G, N].
std::vector<std::unique_ptr<Quantized>> find_quantized(
    const std::map<std::string, StoredTensor>& tensors, const std::filesystem::path& folder,
    const kernels::Quantization& block);

}  // namespace moesh::checkpoint
