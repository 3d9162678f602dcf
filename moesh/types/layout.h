#pragma once
// The axes of the mesh, and the placement of a tensor on each axis of one view: Dense or Sparse.
// A layout is a structural value, so it serves as a template argument and at run time alike.

#include <array>
#include <concepts>
#include <cstdint>
#include <string>

#include "moesh/types/place.h"

namespace moesh {

// clang-format off
/// A set of mesh axes, one bit each. dp and edp are compute axes made of two storage axes.
enum class Axes : std::uint8_t {
  none = 0,
  pp = 1, dp_replicate = 2, dp_shard = 4, cp = 8, tp = 16,  // dense view: pp x dp_replicate x dp_shard x cp x tp
  efsdp = 32, ep = 64, etp = 128,                           // sparse view: pp x dp_replicate x efsdp x ep x etp
  dp = dp_replicate | dp_shard, edp = dp_replicate | efsdp,
  fsdp = dp_shard | cp,  // the ranks that share the storage of a dense parameter
};
// clang-format on
using enum Axes;

constexpr Axes operator|(Axes a, Axes b) {
  return static_cast<Axes>(static_cast<int>(a) | static_cast<int>(b));
}
constexpr Axes operator&(Axes a, Axes b) {
  return static_cast<Axes>(static_cast<int>(a) & static_cast<int>(b));
}
constexpr bool contains(Axes set, Axes part) { return (set & part) == part; }

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
constexpr auto adjoint(Layout auto layout) {
  return each(layout, [](Place p) { return adjoint(p); });
}

/// The axes on which the layout has this placement.
constexpr Axes axes_with(Layout auto layout, Place place) {
  Axes found = none;
  for (int i = 0; i < 3; ++i)
    if (places(layout)[i] == place) found = found | layout.axes[i];
  return found;
}

/// The one placement which the layout has on all of `set`; a set of several axes needs the same
/// letter on each.
constexpr Place on(Layout auto layout, Axes set) {
  Axes axes = none;
  for (Axes axis : layout.axes)
    if (contains(set, axis)) axes = axes | axis;
  if (axes == none || axes != set)
    throw "not an axis of this view: dense tensors have dp, cp, tp; sparse ones edp, ep, etp; cross with sparse(x) or dense(x)";
  for (Place place : places(layout))
    if (contains(axes_with(layout, place), axes)) return place;
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
