#pragma once
// Cases of which `make test` takes a sample: `moesh_test(NAME ... LONG)` registers NAME.long, the
// same program for `make long`.

#include <cstdlib>

namespace moesh {

/// Whether everything is wanted, as in `make long`, and not a sample.
inline bool is_long() { return std::getenv("MOESH_TEST_LONG") != nullptr; }

}  // namespace moesh
