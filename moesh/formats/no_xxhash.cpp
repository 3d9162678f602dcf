#include "moesh/base/error.h"
#include "moesh/formats/checksum.h"

namespace moesh::formats {

bool has_checksums() { return false; }

std::uint64_t hash_block(std::span<const std::byte>) {
  throw Error(
      ErrorKind::config,
      "cannot compute a checksum: moesh was built without xxHash; install it (Debian: libxxhash-dev), or name the folder of "
      "xxhash.h by -DMOESH_XXHASH_INCLUDE=..., and build again");
}

}  // namespace moesh::formats
