#pragma once
// The version, which only the CMakeLists.txt of the tree states.

#include <string>

namespace moesh {

/// "0.1.0": see docs/formats.md for what it promises.
std::string version();
/// The LibTorch that moesh was compiled with, "2.13".
std::string torch_version();

}  // namespace moesh
