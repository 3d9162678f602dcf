#include "moesh/formats/toml.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/name.h"

namespace moesh::formats {
namespace {

// Some texts break the promises which the parser makes to itself: an error, not the end of the
// program.
struct BrokenPromise {};
[[noreturn]] void give_up() { throw BrokenPromise(); }

}  // namespace
}  // namespace moesh::formats

#define TOML_ASSERT(expression) ((expression) ? void() : ::moesh::formats::give_up())
#include <toml++/toml.h>

namespace moesh::formats {
namespace {

int line_of(const toml::node& node) { return static_cast<int>(node.source().begin.line); }

// A list of texts as one, with commas between them; nothing: it is not such a list, or a text has a
// comma.
std::optional<std::string> joined(const toml::node& node) {
  const auto* list = node.as_array();
  if (!list || !(list->empty() || list->is_homogeneous<std::string>())) return std::nullopt;
  std::string all;
  for (const auto& entry : *list) {
    const std::string& text = entry.as_string()->get();
    if (text.find(',') != std::string::npos) return std::nullopt;
    all += (&entry == &list->front() ? "" : ",") + text;
  }
  return all;
}

void flatten(const toml::table& table, const std::string& prefix, const std::string& name,
             std::vector<TomlEntry>& entries) {
  for (const auto& [key, node] : table) {
    const std::string path = prefix + std::string(key);
    MOESH_CHECK(!key.str().empty(), ErrorKind::config, name, ":", line_of(node),
                ": a key without a name; a key is section.name");
    if (const auto* below = node.as_table()) {
      flatten(*below, path + '.', name, entries);
      continue;
    }
    if (const auto* list = node.as_array(); list && list->is_array_of_tables()) {
      std::size_t number = 0;
      for (const auto& entry : *list)
        flatten(*entry.as_table(), path + '.' + std::to_string(number++) + '.', name, entries);
      continue;
    }
    TomlEntry entry{.key = path, .line = line_of(node)};
    if (const auto* flag = node.as_boolean()) {
      entry.value = flag->get();
    } else if (const auto* whole = node.as_integer()) {
      entry.value = std::int64_t{whole->get()};
    } else if (const auto* real = node.as_floating_point()) {
      entry.value = real->get();
    } else if (const auto* text = node.as_string()) {
      entry.value = text->get();
    } else if (const auto texts = joined(node)) {
      entry.value = *texts;
    } else {
      throw Error(
          ErrorKind::config,
          detail::concat(
              name, ":", entry.line, ": ", path, " is ",
              node.is_array() ? "a list" : "a date or a time",
              "; a value is a text, a number, true or false",
              node.is_array() ? ", and an entry of a list is written below [[" + path + "]]" : ""));
    }
    entries.push_back(std::move(entry));
  }
}

// TOML has no control characters but tabs and line ends, and other letters than ASCII's are in
// only in texts and comments: the parser asks whether one is a space, in a way that is undefined
// for some.
void check_characters(std::string_view text, const std::string& name) {
  std::size_t line = 1;
  std::string_view quotes;  // those that end the text which we are in
  bool is_comment = false;
  char before = '\n';  // the last character other than a space, outside of texts
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') ++line;
    MOESH_CHECK((byte >= 0x20 && byte != 0x7f) || c == '\n' || c == '\r' || c == '\t',
                ErrorKind::config, name, ":", line, ": byte ", static_cast<int>(byte),
                " is a control character; is this a configuration file?");
    if (c == '\n' && (is_comment || quotes.size() == 1)) before = c;
    if (is_comment) {
      is_comment = c != '\n';
    } else if (!quotes.empty()) {
      if (c == '\\' && quotes[0] == '"') {
        // At the end of a line it joins the next: what follows is asked whether it is a space.
        const auto next = text.find_first_not_of(quotes.size() == 3 ? " \t\r\n" : "", i + 1);
        MOESH_CHECK(next == std::string_view::npos || static_cast<unsigned char>(text[next]) < 0x80,
                    ErrorKind::config, name, ":", line, ": ", shown(text.substr(i, next - i + 4)),
                    ": only ASCII letters may follow a backslash");
        i += i + 1 < text.size() && text[i + 1] >= 0x20;
      } else if (text.substr(i).starts_with(quotes)) {
        i += quotes.size() - 1;
        // Up to two more belong to a text that ends with quotes.
        for (int more = 0; quotes.size() == 3 && more < 2 && i + 1 < text.size(); ++more)
          i += text[i + 1] == quotes[0];
        quotes = {};
      } else if (c == '\n' && quotes.size() == 1) {
        quotes = {};
      }
    } else if (c == '"' || c == '\'') {
      MOESH_CHECK(std::string_view("\n=,[{.").find(before) != std::string_view::npos,
                  ErrorKind::config, name, ":", line,
                  ": a quote where no text can begin; texts follow = or a comma");
      before = c;
      const std::string_view three = c == '"' ? R"(""")" : "'''";
      quotes = text.substr(i).starts_with(three) ? three : three.substr(0, 1);
      i += quotes.size() - 1;
    } else {
      MOESH_CHECK(
          byte < 0x80, ErrorKind::config, name, ":", line, ": ", shown(text.substr(i, 4)),
          " outside of quotes; keys and values are ASCII, so put other characters in quotes");
      is_comment = c == '#';
      if (c != ' ' && c != '\t' && c != '\r') before = c;
    }
  }
}

// Tables in tables are parsed, walked and freed by recursion. A text with many dots that is not a
// key, such as a long text, does not count: it has other characters between them.
void check_key_parts(std::string_view text, const std::string& name) {
  std::size_t line = 1, num_dots = 0;
  for (const char c : text) {
    if (c == '\n') ++line;
    const bool is_of_key = std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' ||
                           c == '.' || c == ' ' || c == '\t' || c == '"' || c == '\'';
    num_dots = is_of_key ? num_dots + (c == '.') : 0;
    MOESH_CHECK(num_dots < kMaxKeyParts, ErrorKind::config, name, ":", line,
                ": a key of more than ", kMaxKeyParts, " parts; a key is section.name");
  }
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          std::array<char, 8> code;
          std::snprintf(code.data(), code.size(), "\\u%04X",
                        static_cast<unsigned>(static_cast<unsigned char>(c)));
          out += code.data();
        } else {
          out += c;
        }
    }
  }
  return out + '"';
}

std::string shortest(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  std::string text(digits.data(), end);
  if (const auto e = text.find('e'); e != std::string::npos && text[e + 2] == '0')
    text.erase(e + 2, 1);  // 1e-08
  if (text.find_first_of(".e") == std::string::npos)
    text += ".0";  // 1 would read back as an integer
  return text;
}

}  // namespace

std::vector<TomlEntry> parse_toml(std::string_view text, const std::string& name) {
  MOESH_CHECK(text.size() <= kMaxTomlBytes, ErrorKind::config, name, " has ", text.size(),
              " bytes; a configuration has at most ", kMaxTomlBytes);
  check_characters(text, name);
  check_key_parts(text, name);
  std::vector<TomlEntry> entries;
  try {
    flatten(toml::parse(text, name), "", name, entries);
  } catch (const toml::parse_error& e) {
    throw Error(ErrorKind::config,
                detail::concat(name, ":", e.source().begin.line, ": ", e.description(), " (column ",
                               e.source().begin.column, ")"));
  } catch (const BrokenPromise&) {
    throw Error(ErrorKind::config,
                name + ": this is not TOML; look for a bracket or a quote where none belongs");
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const TomlEntry& a, const TomlEntry& b) { return a.line < b.line; });
  return entries;
}

std::vector<TomlEntry> read_toml(const std::string& path) {
  return parse_toml(read_file_or_pipe(path, ErrorKind::config, kMaxTomlBytes), path);
}

std::string to_toml(const TomlValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (const auto* whole = std::get_if<std::int64_t>(&value)) return std::to_string(*whole);
  if (const auto* real = std::get_if<double>(&value)) return shortest(*real);
  return quoted(std::get<std::string>(value));
}

}  // namespace moesh::formats
