#pragma once
// What the fuzz targets share. A target hands its input to a parser: an Error of its kind is an
// answer, and anything else that goes wrong, a broken promise too, ends the program, which is what
// the fuzzer looks for.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "moesh/base/error.h"

namespace moesh::fuzz {

inline void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

/// What f returns; nothing where it refuses the input.
template <class F>
auto unless_refused(F f, ErrorKind kind = ErrorKind::data) -> std::optional<decltype(f())> {
  try {
    return f();
  } catch (const Error& e) {
    must(e.kind() == kind, "what is wrong with an input is an Error of its kind");
    must(*e.what() != 0, "an Error says what is wrong");
    return std::nullopt;
  }
}

/// The first byte of an input says how the rest of it is read.
struct Input {
  bool raw;  // as it is; else the target adds the length or the checksum that no fuzzer guesses
  std::string_view rest;

  Input(const std::uint8_t* data, std::size_t size)
      : raw(size > 0 && data[0] == 'r'),
        rest(reinterpret_cast<const char*>(data) + (size > 0), size - (size > 0)) {}
};

}  // namespace moesh::fuzz
