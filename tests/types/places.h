#pragma once
// What the tests of the type layer use: all placements, placements from letters, and the sentence
// of a refusal.

#include <array>
#include <string>

#include "moesh/types/layout.h"

namespace moesh {

inline constexpr std::array kPlaces{Place::R, Place::I, Place::P, Place::T, Place::F, Place::E};

/// 'T' -> Place::T
constexpr Place place(char letter_of_place) {
  for (Place p : kPlaces)
    if (letter(p) == letter_of_place) return p;
  throw "no placement has this letter";
}

/// What f() throws; empty when it throws nothing. With values known at run time a rule throws its
/// sentence.
std::string refusal(auto f) {
  try {
    f();
  } catch (const char* text) {
    return text;
  }
  return "";
}

/// Calls f with every layout of one view.
template <class L>
constexpr void for_each_layout(auto f) {
  for (Place a : kPlaces)
    for (Place b : kPlaces)
      for (Place c : kPlaces) f(L{a, b, c});
}

}  // namespace moesh
