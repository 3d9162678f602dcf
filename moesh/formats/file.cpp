#include "moesh/formats/file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace moesh::formats {

std::string read_file(const std::string& path, ErrorKind kind) {
  std::error_code ignored;
  MOESH_CHECK(!std::filesystem::is_directory(path, ignored), kind, "cannot read ", path, ": it is a folder; name a file");
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  MOESH_CHECK(in.is_open(), kind, "cannot read ", path, ": ", errno ? std::strerror(errno) : "it does not open",
              "; check the name, which is relative to the folder where the program was started");
  std::string text;
  for (char buffer[1 << 16]; in.read(buffer, sizeof buffer), in.gcount() > 0;)
    text.append(buffer, static_cast<std::size_t>(in.gcount()));
  MOESH_CHECK(!in.bad(), kind, "cannot read ", path, " to its end: ", std::strerror(errno));
  return text;
}

}  // namespace moesh::formats
