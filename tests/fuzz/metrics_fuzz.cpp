// A metrics.jsonl that a run takes over: what it keeps are whole lines of the file, in their order,
// and nothing of them goes the next time.

#include "moesh/formats/json.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  using moesh::formats::kept_lines;
  const std::string text(reinterpret_cast<const char*>(data), size);
  const std::string kept = kept_lines(text, "metrics", 7);
  must(kept.size() <= size + 1, "nothing is made up");
  must(kept.empty() || kept.back() == '\n', "lines are whole");
  must(kept_lines(kept, "metrics", 7) == kept, "what is kept once is kept again");
  must(kept_lines(text, "metrics", 0).empty(), "a run from the beginning keeps nothing");
  return 0;
}
