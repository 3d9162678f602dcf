#pragma once
// The transitions of moesh/types/transition.h, one function each: S stands for T, F and E. Rows of
// tokens go to experts and back by rows.h; a tensor goes to the other view by `sparse`, `dense`.
//
//   name             on the axes A        backward
//   all_gather       S -> R, I            reduce_scatter (P -> S), keep own slice (I -> S)
//   reduce_scatter   P -> S               all_gather (S -> R)
//   all_reduce       P -> R, I            all_reduce (P -> R), identity (I -> R)
//   enter            I -> R               all_reduce (P -> I)
//   keep             R, I -> S            pad (S -> P), all_gather (S -> I)
//   pad              S -> P               keep own slice (R -> S)
//   once             R, I -> P            once (R -> P), identity (R -> I)
//   as_term          S -> P               identity (R -> S)
//
// Transitions that send or sum, in forward or backward, can be started and awaited separately:
// start_all_gather(x), and wait(). Backward begins where forward waits, and waits where forward
// begins.

#include <tuple>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/comm/mesh.h"
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

namespace raw {
/// Plain results, and codes, as the typed tensors Out...: one, or a tuple of several.
template <class... Out>
auto typed_results(const Tensors& plain, const std::shared_ptr<Codes>& codes = nullptr) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    if constexpr (sizeof...(Out) == 1)
      return (with_codes<Out>(plain[i], codes, i), ...);
    else
      return std::tuple<Out...>{with_codes<Out>(plain[i], codes, i)...};
  }(std::index_sequence_for<Out...>());
}
}  // namespace raw

/// Tensors on their way: other work goes on until `wait`, which returns them. It is not a tensor,
/// so nothing can compute with data that has not arrived.
template <class... Out>
class [[nodiscard]] Moving {
 public:
  explicit Moving(raw::StartedStep started, std::shared_ptr<raw::Codes> codes = nullptr)
      : started_(std::move(started)), codes_(std::move(codes)) {}
  auto wait() { return raw::typed_results<Out...>(started_.wait(), codes_); }

 private:
  raw::StartedStep started_;
  std::shared_ptr<raw::Codes> codes_;
};

namespace raw {
template <Axes A, Place To, Step S, auto L>
auto typed_move(const Tensor<L>& x, const SplitDim& along, const char* name,
                const Codec& back = {}) {
  constexpr auto out = transition(L, A, To, S);
  return typed_results<Tensor<out>>(run_pair(
      {x.local()}, in_code(move(x.local(), A, on(L, A), To, along, name), codes_of(x), back)));
}
template <Axes A, Place To, Step S, auto L>
auto typed_start(const Tensor<L>& x, const SplitDim& along, const char* name,
                 const Codec& back = {}) {
  constexpr auto out = transition(L, A, To, S);
  return Moving<Tensor<out>>(StartedStep(
      {x.local()}, in_code(move(x.local(), A, on(L, A), To, along, name), codes_of(x), back)));
}
}  // namespace raw

/// The slices of all ranks, side by side along a dimension.
template <Axes A, Place To = Place::R, auto L>
auto all_gather(const Tensor<L>& x, const SplitDim& along) {
  return raw::typed_move<A, To, Step::all_gather>(x, along, "all_gather");
}
template <Axes A, Place To = Place::R, auto L>
auto start_all_gather(const Tensor<L>& x, const SplitDim& along) {
  return raw::typed_start<A, To, Step::all_gather>(x, along, "all_gather");
}

/// The sum over the ranks; each keeps its slice of it. Backward gathers gradients by the codec.
template <Axes A, Place To = Place::T, auto L>
auto reduce_scatter(const Tensor<L>& x, const SplitDim& along, const Codec& back = {}) {
  return raw::typed_move<A, To, Step::reduce_scatter>(x, along, "reduce_scatter", back);
}
template <Axes A, Place To = Place::T, auto L>
auto start_reduce_scatter(const Tensor<L>& x, const SplitDim& along, const Codec& back = {}) {
  return raw::typed_start<A, To, Step::reduce_scatter>(x, along, "reduce_scatter", back);
}

/// The sum over the ranks.
template <Axes A, Place To = Place::R, auto L>
auto all_reduce(const Tensor<L>& x) {
  return raw::typed_move<A, To, Step::all_reduce>(x, SplitDim{0}, "all_reduce");
}
template <Axes A, Place To = Place::R, auto L>
auto start_all_reduce(const Tensor<L>& x) {
  return raw::typed_start<A, To, Step::all_reduce>(x, SplitDim{0}, "all_reduce");
}

/// From here on the ranks do different work with the value.
template <Axes A, auto L>
auto enter(const Tensor<L>& x) {
  return raw::typed_move<A, Place::R, Step::identity>(x, SplitDim{0}, "enter");
}
template <Axes A, auto L>
auto start_enter(const Tensor<L>& x) {
  return raw::typed_start<A, Place::R, Step::identity>(x, SplitDim{0}, "enter");
}

/// This rank's slice of a value that every rank has whole.
template <Axes A, Place To = Place::T, auto L>
auto keep(const Tensor<L>& x, const SplitDim& along) {
  return raw::typed_move<A, To, Step::keep>(x, along, "keep");
}

/// Full size, zero outside of this rank's slice.
template <Axes A, auto L>
auto pad(const Tensor<L>& x, const SplitDim& along) {
  return raw::typed_move<A, Place::P, Step::pad>(x, along, "pad");
}

/// Kept on one rank, zero on the others, so that a later reduction counts it once (a bias added to
/// a partial sum).
template <Axes A, auto L>
auto once(const Tensor<L>& x) {
  constexpr auto out = [] {
    if (!is_whole(on(L, A)))
      throw "once takes a value that every rank has whole (R or I); a shard becomes a term by as_term<axis>(x)";
    return with(L, A, Place::P);
  }();
  return assume<out>(raw::once(x.local(), A, on(L, A)));
}

/// No change: this rank's value is its own term of a sum (counts, losses).
template <Axes A, auto L>
auto as_term(const Tensor<L>& x) {
  constexpr auto out = [] {
    if (!varies(on(L, A)))
      throw "as_term takes a rank's own value (T, F, E); a whole value becomes a term by once<axis>(x)";
    return with(L, A, Place::P);
  }();
  return assume<out>(x.local());
}

/// The sum of the values of all pipeline stages, without autograd. pp is not part of a layout: each
/// stage has a tensor of this layout, and gets one.
template <auto L>
Tensor<L> sum_over_stages(const Tensor<L>& x) {
  return assume<L>(current_mesh().group(pp)->all_reduce(x.local().detach()));
}

/// Where dp and cp carry one letter and tp another, the two views agree only if ep x etp is exactly
/// tp.
inline void check_crossing(bool same_letter_everywhere) {
  if (same_letter_everywhere) return;
  const auto& s = current_mesh().shape();
  MOESH_CHECK(
      s.ep * s.etp == s.tp, ErrorKind::config,
      "a tensor with one letter on dp and cp and another on tp crosses the views only where ep * etp is tp; ep = ",
      s.ep, ", etp = ", s.etp, ", tp = ", s.tp, ". Bring it to the same letter on all axes first.");
}

/// Dense -> Sparse: the same tensor in the other view.
template <auto L>
auto sparse(const Tensor<L>& x) {
  constexpr Sparse to = cross(L);
  check_crossing(all_equal(L));
  return assume<to>(x.local());
}

/// The same of coded rows.
template <auto L>
auto sparse(const Coded<Tensor<L>>& x) {
  const auto place = sparse(x.place());
  return Coded<std::remove_cvref_t<decltype(place)>>(place, x.words(), x.codec());
}

/// Sparse -> Dense.
template <auto L>
auto dense(const Tensor<L>& x) {
  constexpr Dense to = cross(L);
  check_crossing(all_equal(L));
  return assume<to>(x.local());
}

}  // namespace moesh
