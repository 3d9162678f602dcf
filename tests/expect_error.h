#pragma once
// A mistake in what was asked for, in one line.

#include <functional>
#include <string>

#include "tests/support.h"

namespace moesh {

/// Fails unless `f` throws an Error (config) that says so.
inline void expect_error(const std::function<void()>& f, const std::string& part) {
  expect_parts(error_of(f, ErrorKind::config), {part});
}

}  // namespace moesh
