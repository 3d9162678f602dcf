#include "moesh/base/error.h"
#include "moesh/formats/json_lines.h"

namespace moesh::formats {

bool has_json() { return false; }

void each_json_text(std::istream&, const std::string& name, const std::string&, const std::function<void(const std::string&)>&) {
  throw Error(ErrorKind::data, detail::concat("cannot read ", name,
                                              ": moesh was built without nlohmann/json; install it (Debian: "
                                              "nlohmann-json3-dev) and build again, or give the texts as one plain file"));
}

}  // namespace moesh::formats
