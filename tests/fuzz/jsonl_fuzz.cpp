// A file of data: one JSON object in each line, of which "text" is taken.

#include <sstream>

#include "moesh/formats/json.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::istringstream lines(text);
  std::size_t taken = 0;
  unless_refused([&] {
    moesh::formats::each_json_text(lines, "data", "text",
                                   [&](const std::string& found) { taken += found.size(); });
    return true;
  });
  must(taken <= size, "no text is longer than the file that has it");
  return 0;
}
