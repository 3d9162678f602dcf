// 'r' and a whole file; or any other byte, two bytes that give the size of the data, and a header.

#include <string>

#include "moesh/formats/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace moesh::fuzz {
namespace {

using namespace moesh::formats;

void check(const SafetensorsHeader& header, std::uint64_t file_size) {
  std::uint64_t reached = header.data_start;
  for (const TensorInfo& tensor : header.tensors) {
    must(header.data_start + tensor.begin == reached && tensor.end >= tensor.begin,
         "tensors follow each other");
    must(header.find(tensor.name) == &tensor, "a tensor is found by its name");
    reached += tensor.end - tensor.begin;
  }
  must(reached == file_size, "the tensors are all of the data");

  std::vector<TensorInfo> tensors = header.tensors;
  const std::string written = write_safetensors_header(tensors, header.metadata);
  const SafetensorsHeader again =
      parse_safetensors(written, written.size() + (file_size - header.data_start));
  must(again.metadata == header.metadata && again.tensors.size() == tensors.size(),
       "what was read can be written and read");
  for (const TensorInfo& tensor : tensors) {
    const TensorInfo* found = again.find(tensor.name);
    must(found && *found == tensor, "a tensor reads back as it was written");
  }
}

}  // namespace
}  // namespace moesh::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  const Input input(data, size);
  std::string bytes(input.rest);
  std::uint64_t file_size = bytes.size();
  if (!input.raw) {
    if (bytes.size() < 2) return 0;
    const std::uint64_t length = bytes.size() - 2;
    const auto data_size = static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[0]) |
                                                      static_cast<unsigned char>(bytes[1]) << 8);
    bytes.replace(0, 2, 8, '\0');
    for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i) & 0xff);
    file_size = bytes.size() + data_size;
  }
  if (bytes.size() < 8) return 0;  // the caller of the parser has read as many
  if (const auto header =
          unless_refused([&] { return moesh::formats::parse_safetensors(bytes, file_size); }))
    check(*header, file_size);
  return 0;
}
