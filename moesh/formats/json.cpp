#include "moesh/formats/json.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "moesh/base/error.h"
#include "moesh/formats/json_reason.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

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
                " comes twice in one object, so it is not clear which one counts");
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

// `indent` is what lines begin with; null: no lines.
void write(const JsonValue& value, const std::string* indent, std::string& out);

struct Writer {
  const std::string* indent;
  std::string& out;

  void operator()(std::nullptr_t) const { out += "null"; }
  void operator()(bool value) const { out += value ? "true" : "false"; }
  void operator()(std::int64_t value) const { out += std::to_string(value); }
  void operator()(std::uint64_t value) const { out += std::to_string(value); }
  void operator()(double value) const {
    MOESH_CHECK(std::isfinite(value), ErrorKind::data, "JSON has no ", value,
                "; write a text, or nothing");
    out += nlohmann::json(value)
               .dump();  // the shortest that reads back the same, and 1.0 with its point
  }
  void operator()(const std::string& value) const { out += json_quoted(value); }
  void operator()(const JsonList& list) const {
    items(list, '[', ']',
          [this](const JsonValue& item, const std::string* deeper) { write(item, deeper, out); });
  }
  void operator()(const JsonObject& object) const {
    items(object, '{', '}', [this](const auto& item, const std::string* deeper) {
      out += json_quoted(item.first) + (indent ? ": " : ":");
      write(item.second, deeper, out);
    });
  }

 private:
  template <class Items, class F>
  void items(const Items& all, char first, char last, F write_one) const {
    out += first;
    const std::string deeper = indent ? *indent + "  " : "";
    for (bool comma = false; const auto& item : all) {
      if (std::exchange(comma, true)) out += ',';
      if (indent) out += '\n' + deeper;
      write_one(item, indent ? &deeper : nullptr);
    }
    if (indent && !all.empty()) out += '\n' + *indent;
    out += last;
  }
};

void write(const JsonValue& value, const std::string* indent, std::string& out) {
  std::visit(Writer{indent, out}, value.value);
}

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

std::string to_json(const JsonValue& value) {
  std::string text;
  const std::string no_indent;
  write(value, &no_indent, text);
  return text + '\n';
}

std::string to_json_line(const JsonValue& value) {
  std::string text;
  write(value, nullptr, text);
  return text + '\n';
}

std::string json_quoted(std::string_view text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorKind::data,
                detail::concat("cannot write ", shown(text), " as JSON: it is not UTF-8 (",
                               json_reason(e), ")"));
  }
}

}  // namespace moesh::formats
