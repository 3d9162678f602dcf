#pragma once
// Whole files from outside, with an error that names the file and the reason.

#include <string>

#include "moesh/base/error.h"

namespace moesh::formats {

/// The bytes of a file; `kind` is that of the Error when it cannot be read.
std::string read_file(const std::string& path, ErrorKind kind);

}  // namespace moesh::formats
