// For safetensors_peer.py, which compares moesh with the Python package safetensors.
//   safetensors_peer check FILE...   a line for each: "taken", or "refused: " and why
//   safetensors_peer copy IN OUT     reads every tensor of IN by range and writes them to OUT, last one first

#include <algorithm>
#include <fstream>
#include <iostream>

#include "moesh/base/error.h"
#include "moesh/formats/safetensors.h"

namespace moesh::formats {
namespace {

void check(const std::string& path) {
  try {
    SafetensorsFile{path};
    std::cout << "taken\n";
  } catch (const Error& e) {
    std::cout << "refused: " << e.what() << '\n';
  }
}

void copy(const std::string& from, const std::string& to) {
  const SafetensorsFile in(from);
  std::vector<TensorInfo> tensors = in.header().tensors;
  std::reverse(tensors.begin(), tensors.end());
  const std::string header = write_safetensors_header(tensors, in.header().metadata);
  std::ofstream out(to, std::ios::binary);
  out << header;
  for (const TensorInfo& tensor : tensors) {
    const TensorInfo& source = *in.header().find(tensor.name);
    std::string bytes(source.end - source.begin, '\0');
    in.read(in.header().data_start + source.begin, std::as_writable_bytes(std::span(bytes)));
    out.seekp(static_cast<std::streamoff>(header.size() + tensor.begin));
    out << bytes;
  }
  MOESH_CHECK(out.flush(), ErrorKind::data, "cannot write ", to);
}

}  // namespace
}  // namespace moesh::formats

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() >= 2 && args[0] == "check") {
      std::for_each(args.begin() + 1, args.end(), moesh::formats::check);
    } else if (args.size() == 3 && args[0] == "copy") {
      moesh::formats::copy(args[1], args[2]);
    } else {
      std::cerr << "safetensors_peer check FILE... | copy IN OUT\n";
      return 2;
    }
  } catch (const moesh::Error& e) {
    std::cerr << e.what() << '\n';
    return 1;
  }
}
