#include "moesh/base/error.h"

namespace moesh {

const char* to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::config: return "config";
    case ErrorKind::data: return "data";
    case ErrorKind::storage: return "storage";
    case ErrorKind::comm: return "comm";
    case ErrorKind::device: return "device";
    case ErrorKind::diverged: return "diverged";
    case ErrorKind::internal: return "internal";
  }
  return "unknown";
}

namespace detail {

void fail(const char* file, int line, const char* condition, ErrorKind kind,
          const std::string& text) {
  if (kind != ErrorKind::internal) throw Error(kind, text);
  throw Error(kind, concat(text, " [", file, ":", line, ": ", condition, " does not hold]"));
}

}  // namespace detail
}  // namespace moesh
