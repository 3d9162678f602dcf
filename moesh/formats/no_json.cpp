#include "moesh/base/error.h"
#include "moesh/formats/json.h"
#include "moesh/formats/json_lines.h"

namespace moesh::formats {
namespace {

constexpr const char* kCure =
    ": moesh was built without nlohmann/json; install it (Debian: nlohmann-json3-dev), or name its folder by "
    "-DMOESH_JSON_INCLUDE=..., and build again";

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::data, detail::concat("cannot ", what, kCure));
}

}  // namespace

bool has_json() { return false; }

void each_json_text(std::istream&, const std::string& name, const std::string&,
                    const std::function<void(const std::string&)>&) {
  throw Error(ErrorKind::data,
              detail::concat("cannot read ", name, kCure, ", or give the texts as one plain file"));
}

JsonValue parse_json(std::string_view, const std::string& name, const JsonLimits&) {
  refuse("read " + name);
}

std::string to_json(const JsonValue&) { refuse("write JSON"); }
std::string to_json_line(const JsonValue&) { refuse("write JSON"); }

std::string json_quoted(std::string_view) { refuse("write JSON"); }

}  // namespace moesh::formats
