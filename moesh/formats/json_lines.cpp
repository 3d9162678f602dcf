#include "moesh/formats/json_lines.h"

#include <nlohmann/json.hpp>

#include "moesh/base/error.h"
#include "moesh/formats/json_reason.h"

namespace moesh::formats {

std::string text_of_json_line(std::string_view line, const std::string& where,
                              const std::string& key) {
  // The parser takes seven times its text, and a NUL for the end of it.
  MOESH_CHECK(line.size() <= kMaxLineBytes, ErrorKind::data, where, "this line has ", line.size(),
              " bytes; at most ", kMaxLineBytes, " are read: split the document");
  const auto nul = line.find('\0');
  MOESH_CHECK(nul == std::string::npos, ErrorKind::data, where, "byte ", nul,
              " of this line is NUL, which no text has: the file is damaged, or not JSON");
  nlohmann::json object;
  try {
    object = nlohmann::json::parse(line);
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorKind::data,
                detail::concat(where, "this line is not JSON (", json_reason(e),
                               "); each line is one object, {\"", key, "\": \"...\"}"));
  }
  MOESH_CHECK(object.is_object(), ErrorKind::data, where, "this line is a JSON ",
              object.type_name(), "; each line is one object, {\"", key, "\": \"...\"}");
  const auto found = object.find(key);
  MOESH_CHECK(found != object.end(), ErrorKind::data, where, "this object has no \"", key,
              "\"; each line is {\"", key, "\": \"...\"}, further keys are ignored");
  MOESH_CHECK(found->is_string(), ErrorKind::data, where, "\"", key, "\" is a JSON ",
              found->type_name(), "; it must be a string");
  return std::move(found->get_ref<std::string&>());
}

void each_json_text(std::istream& lines, const std::string& name, const std::string& key,
                    const std::function<void(const std::string& text)>& f) {
  std::string line;
  for (std::int64_t number = 1; std::getline(lines, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    f(text_of_json_line(line, detail::concat(name, ":", number, ": "), key));
  }
  MOESH_CHECK(!lines.bad(), ErrorKind::data, "cannot read ", name, " to its end");
}

}  // namespace moesh::formats
