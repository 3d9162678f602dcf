#pragma once
// Files of token ids: Megatron's PREFIX.bin with PREFIX.idx, .npy of NumPy, and plain .bin files.
// Ids are read as they are asked for, and an index is mapped into memory: their size does not
// matter. PREFIX.mask, beside PREFIX.bin and PREFIX.idx, says for each token whether a model is to
// predict it: a byte for each, 1 or 0.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/formats/file.h"

namespace moesh::formats {

/// How an id lies in a file, little-endian.
enum class IdType { uint8, int8, int16, uint16, int32, uint32, int64, uint64 };
std::size_t size_of(IdType type);
const char* to_string(IdType type);

/// A regular file in memory, for reading.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::string_view bytes() const { return bytes_; }

 private:
  std::string_view bytes_;
};

/// The contents of an .idx. Arrays are not aligned: they are read value by value.
///
///   "MMIDIDX" 0 0, version (u64, 1), type (u8), sequences (u64), documents + 1 (u64),
///   lengths (i32 of each sequence), offsets into .bin in bytes (i64 of each),
///   the first sequence of each document, and at last the number of sequences (i64)
struct TokenIndex {
  IdType type;
  std::int64_t num_sequences = 0, num_documents = 0;
  std::string_view lengths, offsets, documents;

  std::int64_t length(std::int64_t sequence) const;
  std::int64_t offset(std::int64_t sequence) const;
  std::int64_t first_sequence(std::int64_t document) const;
};
/// Checked as a whole: sequences follow each other and are all of the `bin_size` bytes. `name` is
/// what errors (data) call the text.
TokenIndex parse_token_index(std::string_view bytes, std::uint64_t bin_size,
                             const std::string& name);
/// The first bytes of an .idx.
std::string token_index_header(IdType type, std::int64_t num_sequences, std::int64_t num_documents);

/// The header of an .npy file of integers. The values are all that follows from `data_start` on,
/// the last dimension innermost.
struct NpyHeader {
  IdType type;
  std::vector<std::int64_t> sizes;
  std::size_t data_start;
};
NpyHeader parse_npy(std::string_view bytes, const std::string& name);
/// The bytes before the numbers.
std::string npy_header(IdType type, std::span<const std::int64_t> sizes);

class TokenFile {
 public:
  /// PREFIX.bin with PREFIX.idx; either of them, or the prefix, may be named.
  static TokenFile open_indexed(const std::string& path);
  /// One document.
  static TokenFile open_npy(const std::string& path);
  static TokenFile open_flat(const std::string& path, IdType type);

  const std::string& name() const { return name_; }
  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t num_documents() const { return has_index() ? index_.num_documents : 1; }
  /// The first token of a document.
  std::int64_t start(std::int64_t document) const;
  /// Tokens from `begin` on; an id that is not in [0, vocab_size) is an Error (data) that names
  /// file and position.
  void copy(std::int64_t begin, std::int64_t vocab_size, std::span<std::int32_t> to) const;
  /// Whether there is a PREFIX.mask, and its bytes from token `begin` on; any but 0 and 1 is an
  /// Error (data) that names file and position.
  bool has_mask() const { return mask_ != nullptr; }
  void copy_mask(std::int64_t begin, std::span<std::uint8_t> to) const;

 private:
  TokenFile(std::string name, IdType type) : name_(std::move(name)), type_(type) {}
  void take(std::shared_ptr<const InputFile> file, std::uint64_t begin);
  bool has_index() const { return index_file_ != nullptr; }
  void check_range(std::int64_t begin, std::int64_t count) const;

  std::string name_;
  IdType type_;
  // Not mapped: if such a file is cut short, a read is an error that says so, and the
  // process would die. Nor is what was read of a large file counted as memory of the process.
  std::shared_ptr<const InputFile> file_;
  std::uint64_t begin_ = 0;  // of the ids in it
  std::shared_ptr<const MappedFile> index_file_;
  TokenIndex index_{};
  std::shared_ptr<const InputFile> mask_;  // null: there is none
  std::int64_t num_tokens_ = 0;
};

}  // namespace moesh::formats
