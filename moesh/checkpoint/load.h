#pragma once
// Loading a model or a checkpoint, also weights that are published in fewer bits.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moesh/checkpoint/agree.h"
#include "moesh/checkpoint/part.h"
#include "moesh/formats/disk.h"
#include "moesh/formats/manifest.h"
#include "moesh/kernels/quantized.h"

namespace moesh::checkpoint {

// Weights in fewer bits with scales beside them, as some models are published. They are read as
// float32; nothing here writes them.

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

// Loading: each rank reads what its parts need, by range, from a folder that moesh or others wrote.
// Where there is a manifest, every block is compared with its checksum when it is read.

/// A safetensors file that is read in blocks, of which the last few are kept.
class BlockFile {
 public:
  /// Without `expected` nothing is compared. The blocks of the header are checked here.
  BlockFile(const std::filesystem::path& path, const formats::ManifestFile* expected);

  const formats::SafetensorsFile& file() const { return file_; }
  void read(std::uint64_t offset, std::span<std::byte> to);
  /// The same where they are in memory, or, if they span two blocks or do not begin at a multiple
  /// of `alignment`, in `buffer`. They stay until the next call.
  const std::byte* bytes(std::uint64_t offset, std::size_t count, std::size_t alignment,
                         std::vector<std::byte>& buffer);
  /// Gives the memory of the kept blocks back: a folder may have hundreds of files.
  void forget() { blocks_ = {}; }
  std::size_t kept_bytes() const;

 private:
  struct ReadBlock {
    std::uint64_t number;
    std::vector<std::byte> bytes;
  };
  const ReadBlock& block(std::uint64_t number);

  formats::SafetensorsFile file_;
  std::optional<formats::ManifestFile> expected_;
  std::vector<ReadBlock> blocks_;  // the last that were read, the newest at the end
};

/// A small file of a folder, such as config.json, compared with the manifest where there is one.
std::string read_text(const std::filesystem::path& folder, const std::string& name,
                      const formats::Manifest* manifest);
/// The config.json of a folder; where there is a manifest, compared with its checksum.
std::string read_config(const std::filesystem::path& folder);

/// The tensors of several files by name.
class TensorFolder {
 public:
  struct FolderTensor : StoredTensor {
    const Quantized* quantized = nullptr;  // null: the bytes are the numbers
  };

  /// The weights of a folder: those of its index, or of model.safetensors. The manifest is used
  /// where there is one. What is quantized counts as the one tensor that it stands for.
  static TensorFolder weights(const std::filesystem::path& folder);
  /// The tensors of a LoRA adapter, from its one file. The manifest is used where there is one.
  static TensorFolder adapter(const std::filesystem::path& folder);
  /// One file by itself, without a manifest.
  static TensorFolder of_file(const std::filesystem::path& file);
  /// All files whose names begin with `prefix`, of a checkpoint with a manifest.
  static TensorFolder of_checkpoint(const std::filesystem::path& folder,
                                    const formats::Manifest& manifest, const std::string& prefix);

  const std::map<std::string, FolderTensor>& tensors() const { return tensors_; }
  /// What a model of text and images has besides its text model, and only that is in `tensors`.
  const std::vector<std::string>& beside_text_model() const { return beside_text_model_; }
  bool has_quantized() const { return !quantized_.empty(); }
  /// The folder, or the one file.
  const std::filesystem::path& path() const { return path_; }
  /// Bytes of blocks in memory: while a rank loads, at most four for each of its four readers.
  std::size_t kept_bytes() const;

 private:
  TensorFolder(std::filesystem::path path, const std::vector<std::string>& files,
               const formats::Manifest* manifest);
  void keep_text_model();
  void join_quantized();

  std::filesystem::path path_;
  std::vector<std::unique_ptr<BlockFile>> files_;
  std::vector<std::unique_ptr<Quantized>> quantized_;
  std::map<std::string, FolderTensor> tensors_;
  std::vector<std::string> beside_text_model_;
};

/// Throws Error (data) unless the folder has the tensors of the table with their shapes, and no
/// others: it lists those that are missing and those that are unexpected.
void check_names(const TensorFolder& folder, const formats::DiskTable& table);
/// Warns of tensors in the folder that are not read although they have values of their own: those
/// that the table leaves out, those of images, and copies that differ from the tensor that they
/// should repeat, as far as a sample of their bytes shows.
void tell_left_out(const TensorFolder& folder, const formats::DiskTable& table);
/// The layout of the experts in the folder; if none fits, check_names of the nearest one throws.
formats::ExpertLayout find_layout(const TensorFolder& folder, const formats::ModelOnDisk& model);

/// A rank's part of a parameter that stays quantized.
struct QuantizedPart {
  std::string name;
  Sizes shape;  // of the whole
  std::shared_ptr<kernels::QuantizedBox> box;
};

/// Fills parts from the tensors of a folder, as a table says. Both outlive it.
class Loader {
 public:
  Loader(const TensorFolder& folder, const formats::DiskTable& table);

  /// Fills the values of all parts, with a heartbeat between pieces. Tensors are read in the order
  /// of the files, so pass many at once. Where numbers must be finite, one that is not is an Error
  /// (data) that names its tensor.
  void load(const std::vector<TensorPart>& parts, const Heartbeat& heartbeat = {},
            bool must_be_finite = false) const;
  /// The same for parameters that stay quantized: codes and scales. All numbers must be finite.
  void load(const std::vector<QuantizedPart>& parts, const Heartbeat& heartbeat = {}) const;
  /// The parameters that are quantized in the folder, by name; each has one format.
  std::map<std::string, kernels::Quantization> quantization() const;
  /// The type in which the folder has a parameter.
  formats::Dtype dtype_of(const std::string& param) const;

 private:
  struct TableEntry {
    const formats::DiskTensor* tensor;
    const formats::Source* source;
  };
  TensorFolder::FolderTensor found(const TableEntry& entry) const;

  const TensorFolder& folder_;
  std::deque<formats::DiskTensor> stored_order_;            // of tensors that are quantized
  std::map<std::string, std::vector<TableEntry>> entries_;  // by parameter
};

}  // namespace moesh::checkpoint
