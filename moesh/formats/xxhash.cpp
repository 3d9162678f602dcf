#define XXH_INLINE_ALL
#include <xxhash.h>

#include "moesh/formats/checksum.h"

namespace moesh::formats {

std::uint64_t hash_block(std::span<const std::byte> block) {
  return XXH3_64bits(block.data(), block.size());
}

}  // namespace moesh::formats
