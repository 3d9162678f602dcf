#include "moesh/base/error.h"
#include "moesh/formats/toml.h"

namespace moesh::formats {

bool has_toml() { return false; }

std::vector<TomlEntry> parse_toml(std::string_view, const std::string& name) {
  throw Error(ErrorKind::config,
              detail::concat(
                  "cannot read ", name,
                  ": moesh was built without toml++; install it (Debian: libtomlplusplus-dev) and "
                  "build again, or give the options on the command line as --section.key=value"));
}

}  // namespace moesh::formats
