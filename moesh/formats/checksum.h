#pragma once
// Checksums of blocks: XXH3-64, one for every 4 MiB of a file, so that reading part of a file
// checks only that part.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moesh::formats {

/// The last block of a file is shorter; an empty file has none.
constexpr std::uint64_t kBlockBytes = std::uint64_t{4} << 20;

constexpr std::uint64_t num_blocks(std::uint64_t size) {
  return size / kBlockBytes + (size % kBlockBytes != 0);
}

std::uint64_t hash_block(std::span<const std::byte> block);
inline std::uint64_t hash_block(std::string_view bytes) {
  return hash_block(std::as_bytes(std::span(bytes)));
}

/// Sums of the blocks of a file which is written in pieces: each writer adds the bytes that it has
/// in memory, and the sums over all writers are those of the whole block, which no writer had. A
/// change of four bytes at a multiple of four always changes the sum.
class BlockSums {
 public:
  struct BlockSum {
    std::uint64_t sum = 0;
    std::uint64_t num_bytes = 0;  // that were added
    bool operator==(const BlockSum&) const = default;
  };

  void add(std::uint64_t offset, std::string_view bytes);
  /// Those behind the last byte that was added are left out.
  const std::vector<BlockSum>& blocks() const { return blocks_; }

 private:
  std::vector<BlockSum> blocks_;
};

/// Sixteen hexadecimal digits, lower case.
std::string checksum_text(std::uint64_t checksum);
/// Accepts only such a text.
std::uint64_t parse_checksum(std::string_view text);

}  // namespace moesh::formats
