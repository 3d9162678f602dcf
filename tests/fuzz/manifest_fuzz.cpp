// 'r' and a whole moesh.json; or any other byte, and what follows its first line.

#include "moesh/formats/manifest.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  using namespace moesh::formats;
  const Input input(data, size);
  std::string text(input.rest);
  if (!input.raw) text.insert(0, "{\"checksum\": \"" + checksum_text(hash_block(text)) + "\",\n");
  const auto manifest = unless_refused([&] { return parse_manifest(text, "manifest"); });
  if (!manifest) return 0;
  for (const ManifestFile& file : manifest->files) {
    must(file.name.front() != '/' && file.name.find("..") != 0 &&
             file.name.find("/.") == std::string::npos,
         "a file is in the folder");
    must(file.blocks.size() == num_blocks(file.size), "every block has its checksum");
    must(manifest->find(file.name) == &file, "a file is found by its name");
  }
  must(parse_manifest(write_manifest(*manifest), "manifest") == *manifest,
       "a manifest reads back as it was written");
  return 0;
}
