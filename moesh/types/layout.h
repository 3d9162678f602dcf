#pragma once
// The axes of the mesh, and what a tensor is on each axis of one view, Dense or Sparse: a
// structural value, so it serves as a template argument and at run time alike.

#include <array>
#include <concepts>
#include <cstdint>
#include <string>

namespace moesh {

/// The placement of a tensor on one axis of the mesh. That of its gradient follows from it.
enum class Place : std::uint8_t {
  R,  // replicate: same value on every rank, used for different work         gradient P
  I,  // invariant: same value, same work on every rank                       gradient I
  P,  // partial:   the value is the sum over ranks, not yet taken            gradient R
  T,  // tokens:    every rank holds its own tokens                           gradient T
  F,  // features:  every rank holds its own features, heads, vocabulary      gradient F
  E,  // experts:   every rank holds its own experts, or the rows sent there  gradient E
};

/// T, F and E say what varies. They use the same collectives and never mix.
constexpr bool varies(Place p) { return p == Place::T || p == Place::F || p == Place::E; }
/// R and I: every rank holds the whole value.
constexpr bool is_whole(Place p) { return p == Place::R || p == Place::I; }
/// The placement of the gradient: an involution.
constexpr Place adjoint(Place p) { return p == Place::R ? Place::P : p == Place::P ? Place::R : p; }
constexpr char letter(Place p) { return "RIPTFE"[static_cast<int>(p)]; }

// clang-format off
/// A set of mesh axes, one bit each. dp and edp are compute axes made of two storage axes.
enum class Axes : std::uint16_t {
  none = 0,
  pp = 1, dp_replicate = 2, dp_shard = 4, cp = 8, tp = 16,  // dense view
  efsdp = 32, ep = 64, etp = 128,                           // sparse view: pp, dp_replicate, these
  ep_nodes = 256, ep_inside = 512,  // ep again: the nodes that it spans, its ranks on each of them
  dp = dp_replicate | dp_shard, edp = dp_replicate | efsdp,
  fsdp = dp_shard | cp,  // the ranks that store a dense parameter in shards
};
// clang-format on
using enum Axes;

constexpr Axes operator|(Axes a, Axes b) { return Axes(std::uint16_t(a) | std::uint16_t(b)); }
constexpr Axes operator&(Axes a, Axes b) { return Axes(std::uint16_t(a) & std::uint16_t(b)); }
constexpr Axes without(Axes a, Axes b) { return Axes(std::uint16_t(a) & ~std::uint16_t(b)); }
constexpr bool contains(Axes set, Axes subset) { return (set & subset) == subset; }
constexpr Axes kTokenAxes = dp | cp | tp;  // ranks that hold different tokens
constexpr Axes kSequenceAxes = cp | tp;    // ... of the same sequences
constexpr Axes kExpertAxes = ep | etp;     // ranks that hold different experts, or slices of them

/// Attention, norms, dense MLP, router, shared experts.
struct Dense {
  Place dp, cp, tp;
  static constexpr std::array axes{Axes::dp, Axes::cp, Axes::tp};
  bool operator==(const Dense&) const = default;
};
/// Routed experts.
struct Sparse {
  Place edp, ep, etp;
  static constexpr std::array axes{Axes::edp, Axes::ep, Axes::etp};
  bool operator==(const Sparse&) const = default;
};

template <class L>
concept Layout = std::same_as<L, Dense> || std::same_as<L, Sparse>;

constexpr std::array<Place, 3> places(Dense l) { return {l.dp, l.cp, l.tp}; }
constexpr std::array<Place, 3> places(Sparse l) { return {l.edp, l.ep, l.etp}; }

/// Applies f to the placement on each axis.
template <Layout L>
constexpr L each(L layout, auto f) {
  const auto p = places(layout);
  return {f(p[0]), f(p[1]), f(p[2])};
}
constexpr auto adjoint(Layout auto l) { return each(l, static_cast<Place (*)(Place)>(adjoint)); }

/// The axes on which the layout has this placement.
constexpr Axes axes_with(Layout auto layout, Place place) {
  Axes found = none;
  for (int i = 0; i < 3; ++i)
    if (places(layout)[i] == place) found = found | layout.axes[i];
  return found;
}

/// The one placement which the layout has on all of `set`: several axes need the same letter.
constexpr Place on(Layout auto layout, Axes set) {
  Axes known = none;
  for (Axes axis : layout.axes)
    if (contains(set, axis)) known = known | axis;
  if (set == none || known != set)
    throw "not an axis of this view: dense tensors have dp, cp, tp; sparse ones edp, ep, etp; cross with sparse(x) or dense(x)";
  for (Place place : places(layout))
    if (contains(axes_with(layout, place), set)) return place;
  throw "the tensor has different placements on these axes: move one axis at a time";
}
/// The layout with `place` on every axis of `set`.
template <Layout L>
constexpr L with(L layout, Axes set, Place place) {
  auto p = places(layout);
  for (int i = 0; i < 3; ++i)
    if (contains(set, L::axes[i])) p[i] = place;
  return {p[0], p[1], p[2]};
}
/// "Dense{T, T, R}"
std::string to_string(Layout auto layout) {
  const auto p = places(layout);
  return std::string(std::same_as<decltype(layout), Dense> ? "Dense{" : "Sparse{") + letter(p[0]) +
         ", " + letter(p[1]) + ", " + letter(p[2]) + "}";
}

}  // namespace moesh
