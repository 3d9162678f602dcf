#pragma once
// Bytes as people write them.

#include <cstdint>
#include <string>

namespace moesh::cli {

/// "80GiB", "80 GB", "500MiB" of --memory. A number without a unit is refused: a user who writes 80
/// does not mean bytes.
std::int64_t parse_size(const std::string& text);

/// "1.50 GiB"
std::string size_text(double bytes);
inline std::string size_text(std::int64_t bytes) { return size_text(static_cast<double>(bytes)); }

}  // namespace moesh::cli
