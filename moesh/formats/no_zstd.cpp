// In place of unzstd.cpp where zstd was not found.

#include "moesh/base/error.h"
#include "moesh/formats/byte_source.h"

namespace moesh::formats {

std::unique_ptr<ByteSource> unzstd(std::unique_ptr<ByteSource>, const std::string& name) {
  throw Error(ErrorKind::config, detail::concat("cannot unpack ", name,
                                                ": this moesh was built without zstd; unpack the ",
                                                "file, or build where libzstd-dev is installed"));
}

}  // namespace moesh::formats
