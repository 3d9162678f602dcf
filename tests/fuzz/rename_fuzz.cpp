// PATTERN, a line end, REPLACEMENT, a line end, and the name of a tensor.

#include "moesh/formats/pattern.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesh::fuzz;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto line = [&] {
    const auto end = std::min(text.find('\n'), text.size());
    const auto first = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return first;
  };
  const auto expression = line(), replacement = line();
  unless_refused(
      [&] {
        const moesh::formats::Pattern pattern(expression);
        must(pattern.replace(text, "$&") == text, "what is put back changes nothing");
        return pattern.replace(text, replacement);
      },
      moesh::ErrorKind::config);
  return 0;
}
