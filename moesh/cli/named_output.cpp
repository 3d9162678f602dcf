#include "moesh/cli/named_output.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/formats/file.h"
#include "moesh/formats/file_system.h"

namespace moesh::cli {

using formats::file_system;

NamedOutput::NamedOutput(std::string option, std::string path)
    : option_(std::move(option)), path_(std::move(path)) {
  // Without O_NONBLOCK, opening a pipe waits for its reader.
  descriptor_ = file_system().open(path_, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK);
  if (descriptor_ < 0) fail(errno);
  ::fcntl(descriptor_, F_SETFL, 0);  // but a reader that is slow is
}

NamedOutput::~NamedOutput() { file_system().close(descriptor_); }

void NamedOutput::write(const std::string& text) {
  for (std::size_t written = 0; written < text.size();) {
    const auto count =
        file_system().append(descriptor_, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail(count < 0 ? errno : EIO);
    written += static_cast<std::size_t>(count);
  }
}

void NamedOutput::fail(int code) const {
  try {
    formats::fail_at(path_, "write", code);
  } catch (const Error& e) {
    throw Error(e.kind() == ErrorKind::data ? ErrorKind::config : e.kind(),
                detail::concat(option_, ": ", e.what(), "; choose a file that can be written"));
  }
}

}  // namespace moesh::cli
