// The text of a model.safetensors.index.json.

#include "moesh/formats/safetensors.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  using namespace moesh::formats;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto index = unless_refused([&] { return parse_safetensors_index(text, "index"); });
  if (!index) return 0;
  for (const std::string& file : index->files()) {
    must(file.find_first_of("/\\") == std::string::npos, "a file is not a path");
    must(!file.empty() && file.front() != '.' && file.find('\0') == std::string::npos,
         "a file has a name");
  }
  must(parse_safetensors_index(write_safetensors_index(*index), "index") == *index,
       "an index reads back as it was written");
  return 0;
}
