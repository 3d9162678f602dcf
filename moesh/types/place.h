#pragma once
// What a tensor is on one axis of the mesh. The placement of its gradient follows from it.

#include <cstdint>

namespace moesh {

enum class Place : std::uint8_t {
  R,  // replicate: same value on every rank, used for different work         gradient P
  I,  // invariant: same value, same work on every rank                       gradient I
  P,  // partial:   the value is the sum over ranks, not yet taken            gradient R
  T,  // tokens:    every rank holds its own tokens                           gradient T
  F,  // features:  every rank holds its own features, heads, vocabulary      gradient F
  E,  // experts:   every rank holds its own experts, or the rows sent there  gradient E
};

/// T, F and E say what varies. They share their collectives and never mix.
constexpr bool varies(Place p) { return p == Place::T || p == Place::F || p == Place::E; }
/// R and I: every rank holds the whole value.
constexpr bool is_whole(Place p) { return p == Place::R || p == Place::I; }

/// The placement of the gradient. An involution.
constexpr Place adjoint(Place p) { return p == Place::R ? Place::P : p == Place::P ? Place::R : p; }

constexpr char letter(Place p) { return "RIPTFE"[static_cast<int>(p)]; }

}  // namespace moesh
