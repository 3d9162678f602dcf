#include "moesh/tokenizer/sections.h"

#include <algorithm>

#include "moesh/base/error.h"
#include "moesh/formats/name.h"

namespace moesh::tokenizer {

JsonSection::JsonSection(const formats::JsonValue& value, std::string name)
    : value_(value), name_(std::move(name)) {
  value_.as_object(name_);
}

const std::string& JsonSection::type() const { return text("type"); }

void JsonSection::refuse_type(const char* known) const {
  throw Error(ErrorKind::data, detail::concat(name_, ": moesh does not know the type ",
                                              formats::shown(type()), "; it knows ", known));
}

void JsonSection::allow(std::initializer_list<std::string_view> keys) const {
  for (const auto& [key, value] : value_.as_object(name_))
    MOESH_CHECK(key == "type" || std::find(keys.begin(), keys.end(), key) != keys.end(),
                ErrorKind::data, name_, ": moesh does not know the key ", formats::shown(key));
}

const formats::JsonValue* JsonSection::find(std::string_view key) const {
  const auto* value = value_.find(key);
  return value && !value->is_null() ? value : nullptr;
}

const formats::JsonValue& JsonSection::at(std::string_view key) const {
  const bool is_file = name_.ends_with(": ");  // which has no path of keys behind it
  return value_.at(key, std::string_view(name_).substr(0, name_.size() - (is_file ? 2 : 0)));
}

std::string JsonSection::name_of(std::string_view key) const {
  return name_ + (name_.ends_with(": ") ? "" : ".") + std::string(key);
}

const std::string& JsonSection::text(std::string_view key) const {
  return at(key).as_text(name_of(key));
}

std::string JsonSection::text_or(std::string_view key, std::string_view otherwise) const {
  const auto* value = find(key);
  return value ? value->as_text(name_of(key)) : std::string(otherwise);
}

bool JsonSection::flag(std::string_view key, bool otherwise) const {
  const auto* value = find(key);
  return value ? value->as_bool(name_of(key)) : otherwise;
}

std::vector<JsonSection> JsonSection::list(std::string_view key) const {
  std::vector<JsonSection> sections;
  const auto& values = at(key).as_list(name_of(key));
  for (std::size_t i = 0; i < values.size(); ++i)
    sections.emplace_back(values[i], detail::concat(name_of(key), "[", i, "]"));
  return sections;
}

}  // namespace moesh::tokenizer
