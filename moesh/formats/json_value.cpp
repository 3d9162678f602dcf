// What needs no parser: looking into values. Parsing and writing are in json.cpp.

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/json.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

const char* type_of(const JsonValue& value) {
  constexpr const char* kTypes[] = {"null",     "true or false", "a whole number", "a whole number",
                                    "a number", "a text",        "a list",         "an object"};
  return kTypes[value.value.index()];
}

template <class T>
const T& as(const JsonValue& value, std::string_view what, const char* wanted) {
  const T* found = std::get_if<T>(&value.value);
  MOESH_CHECK(found, ErrorKind::data, shown(what), " is ", type_of(value), "; it must be ", wanted);
  return *found;
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view key) const {
  if (const auto* object = std::get_if<JsonObject>(&value))
    for (const auto& [name, below] : *object)
      if (name == key) return &below;
  return nullptr;
}

const JsonValue& JsonValue::at(std::string_view key, std::string_view what) const {
  as_object(what);
  const JsonValue* found = find(key);
  MOESH_CHECK(found, ErrorKind::data, shown(what), " has no ", shown(key));
  return *found;
}

bool JsonValue::as_bool(std::string_view what) const {
  return as<bool>(*this, what, "true or false");
}

std::int64_t JsonValue::as_int(std::string_view what) const {
  return as<std::int64_t>(*this, what, "a whole number from -2^63 to 2^63 - 1");
}

std::uint64_t JsonValue::as_size(std::string_view what) const {
  if (const auto* large = std::get_if<std::uint64_t>(&value)) return *large;
  const std::int64_t whole = as<std::int64_t>(*this, what, "a whole number from 0 to 2^64 - 1");
  MOESH_CHECK(whole >= 0, ErrorKind::data, shown(what), " is ", whole, "; it must not be negative");
  return static_cast<std::uint64_t>(whole);
}

double JsonValue::as_number(std::string_view what) const {
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return static_cast<double>(*whole);
  if (const auto* large = std::get_if<std::uint64_t>(&value)) return static_cast<double>(*large);
  return as<double>(*this, what, "a number");
}

const std::string& JsonValue::as_text(std::string_view what) const {
  return as<std::string>(*this, what, "a text");
}

const JsonList& JsonValue::as_list(std::string_view what) const {
  return as<JsonList>(*this, what, "a list");
}

const JsonObject& JsonValue::as_object(std::string_view what) const {
  return as<JsonObject>(*this, what, "an object");
}

JsonValue read_json(const std::string& path, const JsonLimits& limits) {
  return parse_json(InputFile(path).read_all(limits.max_bytes), path, limits);
}

}  // namespace moesh::formats
