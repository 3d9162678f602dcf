#include "moesh/formats/json.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <sstream>
#include <string>

#include "moesh/base/error.h"
#include "moesh/base/text.h"
#include "moesh/formats/file.h"
#include "moesh/formats/name.h"

namespace moesh::formats {

namespace {

// Why nlohmann/json refused a text, in words that may be printed:
// "[json.exception.parse_error.101] parse error at line 1, column 9: ..." without what every
// reader would skip. The text may quote what was read: it is shortened, and bytes that do not
// print become '?'.
std::string json_reason(const std::exception& e) {
  constexpr std::size_t kLongest = 300;
  std::string text = e.what();
  if (const auto end = text.find("] "); end != std::string::npos) text.erase(0, end + 2);
  if (text.size() > kLongest) text.replace(kLongest, std::string::npos, "...");
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) >= 0x7f) c = '?';
  return text;
}

// Takes the events of the parser. nlohmann's own values keep the last of two equal keys without a
// word: hence this.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(const std::string& name, const JsonLimits& limits) : name_(name), limits_(limits) {}

  JsonValue take() { return std::move(root_); }

  bool null() override { return add({nullptr}); }
  bool boolean(bool value) override { return add({value}); }
  bool number_unsigned(std::uint64_t value) override {
    return std::in_range<std::int64_t>(value) ? add({static_cast<std::int64_t>(value)})
                                              : add({value});
  }
  bool number_integer(std::int64_t value) override {
    return value == 0 ? add({-0.0})
                      : add({value});  // only "-0" comes here as a zero, and no integer is that
  }
  bool number_float(double value, const std::string&) override { return add({value}); }
  bool string(std::string& value) override { return add({std::move(value)}); }
  bool binary(nlohmann::json::binary_t&) override { return false; }  // no text has one

  bool start_array(std::size_t) override { return open({JsonList()}); }
  bool end_array() override {
    open_.pop_back();
    return true;
  }
  bool start_object(std::size_t) override { return open({JsonObject()}); }
  bool key(std::string& name) override {
    std::get<JsonObject>(open_.back()->value).emplace_back(std::move(name), JsonValue());
    return true;
  }
  bool end_object() override {
    keys_.clear();
    for (const auto& [name, value] : std::get<JsonObject>(open_.back()->value))
      keys_.push_back(name);
    std::sort(keys_.begin(), keys_.end());
    const auto twice = std::adjacent_find(keys_.begin(), keys_.end());
    MOESH_CHECK(twice == keys_.end(), ErrorKind::data, name_, ": the key ", shown(*twice),
                " comes twice in one object, so it is not clear which one applies");
    open_.pop_back();
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& e) override {
    throw Error(ErrorKind::data, detail::concat(name_, " is not JSON: ", json_reason(e)));
  }

 private:
  JsonValue& place(JsonValue value) {
    MOESH_CHECK(++num_values_ <= limits_.max_values, ErrorKind::data, name_, " has more than ",
                limits_.max_values, " values");
    if (open_.empty()) return root_ = std::move(value);
    if (auto* list = std::get_if<JsonList>(&open_.back()->value))
      return list->emplace_back(std::move(value));
    return std::get<JsonObject>(open_.back()->value).back().second =
               std::move(value);  // behind its key
  }
  bool add(JsonValue value) {
    place(std::move(value));
    return true;
  }
  bool open(JsonValue value) {
    MOESH_CHECK(open_.size() < limits_.max_depth, ErrorKind::data, name_,
                " has objects and lists nested deeper than ", limits_.max_depth);
    open_.push_back(&place(std::move(value)));
    return true;
  }

  const std::string& name_;
  const JsonLimits& limits_;
  JsonValue root_;
  std::vector<JsonValue*>
      open_;  // each is the last value of the one before it, which does not grow until it is closed
  std::vector<std::string_view> keys_;
  std::size_t num_values_ = 0;
};

nlohmann::ordered_json checked(std::string_view text) {
  MOESH_CHECK(find_bad_utf8(text) == std::string_view::npos, ErrorKind::data, "cannot write ",
              shown(text), " as JSON: it is not UTF-8");
  return text;
}

// As the library has it, which writes the shortest number that reads back the same, and 1.0 with
// its point.
struct ForLibrary {
  using Library = nlohmann::ordered_json;

  static Library of(const JsonValue& value) { return std::visit(ForLibrary(), value.value); }

  Library operator()(const auto& plain) const { return plain; }
  Library operator()(double x) const {
    MOESH_CHECK(std::isfinite(x), ErrorKind::data, "JSON has no ", x, "; write a text, or nothing");
    return x;
  }
  Library operator()(const std::string& text) const { return checked(text); }
  Library operator()(const JsonList& list) const {
    Library::array_t all;
    all.reserve(list.size());
    for (const JsonValue& item : list) all.push_back(of(item));
    return all;
  }
  Library operator()(const JsonObject& object) const {
    Library::object_t all;
    all.reserve(object.size());
    for (const auto& [key, item] : object)  // every key is there once: none is looked for
      all.emplace_back(checked(key).get<std::string>(), of(item));
    return all;
  }
};

}  // namespace

JsonValue parse_json(std::string_view text, const std::string& name, const JsonLimits& limits) {
  MOESH_CHECK(text.size() <= limits.max_bytes, ErrorKind::data, name, " has ", text.size(),
              " bytes; it may have ", limits.max_bytes);
  // nlohmann takes a zero byte for the end of the text, and would let anything follow.
  MOESH_CHECK(text.find('\0') == std::string_view::npos, ErrorKind::data, name,
              " is not JSON: byte ", text.find('\0'), " is a zero");
  Builder builder(name, limits);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string to_json(const JsonValue& value) { return ForLibrary::of(value).dump(2) + '\n'; }

std::string to_json_line(const JsonValue& value) { return ForLibrary::of(value).dump() + '\n'; }

std::string json_quoted(std::string_view text) { return checked(text).dump(); }

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

namespace {

std::optional<std::int64_t> step_of(const std::string& line, const std::string& name) {
  try {
    return parse_json(line, name).at("step", name).as_int(name);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

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
  const bool is_chat = object.contains("messages") || object.contains("conversations") ||
                       object.contains("prompt") || object.contains("instruction");
  MOESH_CHECK(found != object.end() || !is_chat, ErrorKind::data, where, "this object has no \"",
              key, "\" and looks like a chat; make tokens of chats with python -m moesh tokenize");
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

std::string kept_lines(const std::string& text, const std::string& name, std::int64_t last_step) {
  std::istringstream lines(last_step > 0 ? text : "");
  std::string kept;
  for (std::string line; std::getline(lines, line);)
    if (const auto step = step_of(line, name); step && *step <= last_step) kept += line + "\n";
  return kept;
}

}  // namespace moesh::formats
