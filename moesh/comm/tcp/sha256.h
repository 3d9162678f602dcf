#pragma once
// SHA-256 and HMAC (FIPS 180-4, RFC 2104): how processes that start together prove to each other
// that they hold the same secret, without sending it.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace moesh::comm {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);

/// In a time that does not tell where they differ.
bool are_same(const Digest& a, const Digest& b);

}  // namespace moesh::comm
