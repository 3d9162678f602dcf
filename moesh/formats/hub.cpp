#include "moesh/formats/hub.h"

#include "moesh/base/error.h"
#include "moesh/formats/file.h"

namespace moesh::formats {

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

}  // namespace moesh::formats
