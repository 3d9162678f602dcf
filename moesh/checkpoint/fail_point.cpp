#include "moesh/checkpoint/fail_point.h"

#ifdef MOESH_WITH_FAIL_POINTS
#include <csignal>
#include <cstdlib>
#include <string_view>

#include "moesh/base/error.h"

namespace moesh::checkpoint {

void fail_point(const char* name) {
  bool is_listed = false;
  for (const std::string_view known : kFailPoints) is_listed |= known == name;
  MOESH_CHECK(is_listed, "the fail point '", name, "' is not in kFailPoints");
  const char* wanted = std::getenv("MOESH_FAIL_POINT");
  if (wanted && std::string_view(wanted) == name) std::raise(SIGKILL);
}

}  // namespace moesh::checkpoint
#endif
