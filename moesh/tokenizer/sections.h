#pragma once
// The objects of a tokenizer.json: each has a type, and keys that must all be known, for what is
// not known would be computed differently.

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "moesh/formats/json.h"

namespace moesh::tokenizer {

class JsonSection {
 public:
  /// `name` is the file and the path of keys: "tokenizer.json: pre_tokenizer".
  JsonSection(const formats::JsonValue& value, std::string name);

  const std::string& name() const { return name_; }
  const std::string& type() const;
  [[noreturn]] void refuse_type(const char* known) const;

  /// Throws where there is a key besides these and "type".
  void allow(std::initializer_list<std::string_view> keys) const;
  /// Null where the key is not there, or its value is null.
  const formats::JsonValue* find(std::string_view key) const;
  const formats::JsonValue& at(std::string_view key) const;
  std::string name_of(std::string_view key) const;

  const std::string& text(std::string_view key) const;
  std::string text_or(std::string_view key, std::string_view otherwise) const;
  bool flag(std::string_view key, bool otherwise) const;
  /// The members of a list, each a section.
  std::vector<JsonSection> list(std::string_view key) const;

 private:
  const formats::JsonValue& value_;
  std::string name_;
};

}  // namespace moesh::tokenizer
