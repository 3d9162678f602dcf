#include "moesh/formats/name.h"

#include <array>
#include <cstdio>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"

namespace moesh::formats {
namespace {

constexpr std::size_t kLongestShown = 200;
constexpr std::size_t kLongestName = 255;  // bytes, on every file system in use

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// Empty where the name may be one.
const char* what_is_wrong(std::string_view name) {
  if (name.empty()) return "it is empty";
  if (name.front() == '.') return "it begins with a dot";
  if (name.size() > kLongestName) return "it is longer than 255 bytes";
  for (char c : name) {
    if (c == '/' || c == '\\') return "it is a path";
    if (is_control(c)) return "it has a control character";
  }
  return "";
}

}  // namespace

std::string shown(std::string_view name) {
  std::string text = "\"";
  for (char c : name.substr(0, kLongestShown)) {
    if (c == '"' || c == '\\') {
      text += '\\';
      text += c;
    } else if (is_control(c) || static_cast<unsigned char>(c) > 0x7f) {
      std::array<char, 8> code;
      std::snprintf(code.data(), code.size(), "\\x%02x",
                    static_cast<unsigned>(static_cast<unsigned char>(c)));
      text += code.data();
    } else {
      text += c;
    }
  }
  return text + (name.size() > kLongestShown ? "...\"" : "\"");
}

void check_file_name(std::string_view name) {
  const std::string wrong = what_is_wrong(name);
  MOESH_CHECK(wrong.empty(), ErrorKind::data, shown(name),
              " does not name a file of this folder: ", wrong,
              "; a name has no '/', no '\\' and no '.' in front");
}

void check_file_path(std::string_view path) {
  const auto slash = path.find('/');
  const bool below = slash != std::string_view::npos;
  std::string wrong = what_is_wrong(below ? path.substr(slash + 1) : path);
  if (below && wrong.empty()) wrong = what_is_wrong(path.substr(0, slash));
  MOESH_CHECK(wrong.empty(), ErrorKind::data, shown(path),
              " does not name a file of this folder: ", wrong,
              "; write name or folder/name, with no '\\' and no '.' in front of either");
}

std::string how_to_download(const std::string& path, const std::string& use) {
  const auto slash = path.find('/');
  const bool is_hub_name = slash != std::string::npos && slash == path.rfind('/') && slash > 0 &&
                           slash + 1 < path.size() && path[0] != '.' && !path.ends_with(".json");
  if (!is_hub_name) return "";
  const std::string local = path.substr(slash + 1);
  return detail::concat(
      "if it is the name of a model on the Hugging Face hub: moesh downloads nothing; get the "
      "folder with `hf download ",
      path, " --local-dir ", local, "`, then write ", use, local);
}

void refuse_hub_name(const std::string& path) {
  const std::string cure = how_to_download(path);
  MOESH_CHECK(cure.empty() || exists(path), ErrorKind::config, "there is no '", path, "' here; ",
              cure);
}

std::string checkpoints_instead(const std::filesystem::path& folder) {
  if (!is_folder(folder)) return "";
  std::string newest;
  for (const std::string& name : names_in(folder))
    if (name.starts_with("step-") && is_folder(folder / name)) newest = name;
  return newest.empty() ? ""
                        : detail::concat("; it holds checkpoints: name one, such as ",
                                         (folder / newest).string());
}

}  // namespace moesh::formats
