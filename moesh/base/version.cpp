#include "moesh/base/version.h"

namespace moesh {

std::string version() { return MOESH_VERSION; }
std::string torch_version() { return MOESH_TORCH_VERSION; }

}  // namespace moesh
