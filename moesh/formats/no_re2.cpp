// In place of pattern.cpp where RE2 was not found.

#include "moesh/base/error.h"
#include "moesh/formats/name.h"
#include "moesh/formats/pattern.h"

namespace moesh::formats {

Pattern::Pattern(std::string_view text) {
  throw Error(ErrorKind::config,
              detail::concat("cannot use the regular expression ", shown(text),
                             ": this moesh was built without RE2; build where libre2-dev is "
                             "installed"));
}

bool Pattern::is_in(std::string_view) const { return false; }
std::string Pattern::replace(std::string_view text, std::string_view) const {
  return std::string(text);
}

}  // namespace moesh::formats
