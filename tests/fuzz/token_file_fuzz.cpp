// 'r' and an .npy file; or any other byte, two bytes that give the size of the .bin, and an .idx.

#include <string>

#include "moesh/formats/token_file.h"
#include "tests/fuzz/fuzz.h"

namespace moesh::fuzz {
namespace {

using namespace moesh::formats;

void check(const TokenIndex& index, std::uint64_t bin_size) {
  std::int64_t reached = 0;
  for (std::int64_t i = 0; i < index.num_sequences; ++i) {
    must(index.offset(i) == reached && index.length(i) >= 0, "sequences follow each other");
    reached += index.length(i) * static_cast<std::int64_t>(size_of(index.type));
  }
  must(static_cast<std::uint64_t>(reached) == bin_size, "they are all of the ids");
  for (std::int64_t d = 0; d < index.num_documents; ++d)
    must(index.first_sequence(d) <= index.first_sequence(d + 1), "documents follow each other");
  must(index.first_sequence(index.num_documents) == index.num_sequences,
       "the documents are all of the sequences");
}

}  // namespace
}  // namespace moesh::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  const Input input(data, size);
  if (input.raw) {
    if (const auto header = unless_refused([&] { return parse_npy(input.rest, "x.npy"); })) {
      std::uint64_t count = size_of(header->type);
      for (const auto n : header->sizes) count *= static_cast<std::uint64_t>(n);
      must(input.rest.size() - header->data_start == count, "the values follow the header");
      const std::string again = npy_header(header->type, header->sizes);
      must(parse_npy(again + std::string(count, 'x'), "y.npy").sizes == header->sizes,
           "what is written is read");
    }
    return 0;
  }
  if (input.rest.size() < 2) return 0;
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(input.rest[i]); };
  const std::uint64_t bin_size = byte(0) | byte(1) << 8;
  const std::string_view text = input.rest.substr(2);
  if (const auto index = unless_refused([&] { return parse_token_index(text, bin_size, "x.idx"); }))
    check(*index, bin_size);
  return 0;
}
