#pragma once
// The label of a position that no loss counts: data writes it, models and losses look for it.

#include <cstdint>

namespace moesh {

inline constexpr std::int64_t kIgnoredLabel = -100;

}  // namespace moesh
