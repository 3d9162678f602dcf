// In place of gunzip.cpp where zlib was not found.

#include "moesh/base/error.h"
#include "moesh/formats/byte_source.h"

namespace moesh::formats {

std::unique_ptr<ByteSource> gunzipped(std::unique_ptr<ByteSource>, const std::string& name) {
  throw Error(ErrorKind::config, detail::concat("cannot unpack ", name,
                                                ": this moesh was built without zlib; unpack the ",
                                                "file, or build where zlib1g-dev is installed"));
}

}  // namespace moesh::formats
