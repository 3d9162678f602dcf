#pragma once
// Several tensors with the same rows in one message: rows, their scores, their experts. A row of
// the message is the bytes of its parts side by side, so that each keeps its dtype and its bits.
// To experts, wide rows travel by themselves beside it.
// Gradients travel the same way. Where they are terms of a sum, the receiver adds them, in the
// order of the ranks and in float32 or wider, and rounds once: what a reduction does.
// Coded rows (codec.h) stay so; the gradients of what comes home travel by a codec, if the
// transition is given one.

#include <vector>

#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/transitions.h"

namespace moesh {

namespace raw {
/// [N, ..] each -> [N, words], and back: `like` has the dtypes and the sizes of a row.
at::Tensor pack_rows(const std::vector<at::Tensor>& parts);
std::vector<at::Tensor> unpack_rows(const at::Tensor& packed, const std::vector<at::Tensor>& like);

/// The `like` of unpack_rows, without the rows.
std::vector<at::Tensor> no_rows_of(const std::vector<at::Tensor>& parts);

/// The rows of all parts to the ranks and back from them. Wide rows are a message of their own,
/// without a copy; the others share one.
SentStep send_rows(comm::Group& group, const std::vector<at::Tensor>& parts,
                   const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv);

MaybeAdjointPair gather_together(Axes axes, const std::vector<std::int64_t>& rows);

/// x, whose gradient is encoded and decoded; no codec: x itself.
at::Tensor with_coded_gradient(const at::Tensor& x, const Codec& codec);

/// The rows of all tensors in one message; gradients go back by the codec.
template <class... Out, class... Parts>
Moving<Out...> start_rows(Axes axes, const std::vector<std::int64_t>& send,
                          const std::vector<std::int64_t>& recv, const Codec& back,
                          const Parts&... parts) {
  const Tensors xs{place_of(parts)...};
  const auto codes = codes_of(parts...);
  return Moving<Out...>(StartedStep(xs, in_code(move_rows(xs[0], axes, send, recv), codes, back)),
                        codes);
}
template <class... Out, class... In>
auto exchange_rows(Axes axes, const std::vector<std::int64_t>& send,
                   const std::vector<std::int64_t>& recv, const In&... rows) {
  const Tensors xs{rows.local()...};
  return typed_results<Out...>(run_pair(xs, move_rows(xs[0], axes, send, recv)));
}
template <class... Parts>
Tensors places_of(const Parts&... parts) {
  return {place_of(parts)...};
}
}  // namespace raw

template <auto L>
class AtNode;
template <class Rows>
inline constexpr bool kIsAtNode = false;
template <auto L>
inline constexpr bool kIsAtNode<AtNode<L>> = true;
template <class Rows>
inline constexpr bool kIsAtNode<Coded<Rows>> = kIsAtNode<Rows>;
/// What transitions take: a Tensor<L>, or rows between two hops; either may be coded.
template <class Rows>
concept RowsAtNode = kIsAtNode<Rows>;
template <class Rows>
concept TypedRows = !kIsAtNode<Rows> && requires { Rows::layout; };

/// x, whose gradient is what experts get of it by the codec, on every mesh, also where nothing
/// travels.
template <auto L>
Tensor<L> with_coded_gradient(const Tensor<L>& x, const Codec& codec) {
  constexpr auto gradient = apply(Unary::over_features, adjoint(L));
  static_assert(gradient == adjoint(L));
  return assume<L>(raw::with_coded_gradient(x.local(), codec));
}

/// S -> R of several tensors [rows[r], ..] in one message; backward: one message, P -> S.
template <Axes A, TypedRows... Parts>
auto start_all_gather_together(const std::vector<std::int64_t>& rows, const Parts&... parts) {
  const auto codes = raw::codes_of(parts...);
  return Moving<
      raw::AsPart<Parts, Tensor<transition(Parts::layout, A, Place::R, Step::all_gather)>>...>(
      raw::StartedStep(raw::places_of(parts...),
                       raw::in_code(raw::gather_together(A, rows), codes, nullptr)),
      codes);
}
template <Axes A, TypedRows... Parts>
auto all_gather_together(const std::vector<std::int64_t>& rows, const Parts&... parts) {
  const auto codes = raw::codes_of(parts...);
  const auto gathered = raw::run_pair(raw::places_of(parts...),
                                      raw::in_code(raw::gather_together(A, rows), codes, nullptr));
  return raw::typed_results<
      raw::AsPart<Parts, Tensor<transition(Parts::layout, A, Place::R, Step::all_gather)>>...>(
      gathered, codes);
}

template <Axes A, auto... Ls>
constexpr bool are_at_home() {
  if (((on(Ls, A) != Place::T) || ...))
    throw "to_experts takes token rows (T) to the ranks that hold their experts";
  return true;
}
template <Axes A, auto L>
constexpr bool are_at_experts() {
  if (on(L, A) != Place::E) throw "to_owners brings rows (E) home from their experts";
  return true;
}

/// T -> E: send[r] rows (dimension 0) go to rank r of the axes, recv[r] come from it; those of all
/// tensors in one message. Backward: to_owners.
template <Axes A, TypedRows... Parts>
auto start_to_experts(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv,
                      const Parts&... rows) {
  static_assert(are_at_home<A, Parts::layout...>());
  return raw::start_rows<raw::AsPart<Parts, Tensor<with(Parts::layout, A, Place::E)>>...>(
      A, send, recv, nullptr, rows...);
}
template <Axes A, auto L>
auto to_experts(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
                const std::vector<std::int64_t>& recv) {
  static_assert(are_at_home<A, L>());
  return raw::exchange_rows<Tensor<with(L, A, Place::E)>>(A, send, recv, rows);
}

/// E -> T: the way back; here `send` and `recv` are what to_experts received and sent. Backward:
/// to_experts, of gradients by the codec.
template <Axes A, auto L>
auto start_to_owners(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
                     const std::vector<std::int64_t>& recv, const Codec& back = {}) {
  static_assert(are_at_experts<A, L>());
  return raw::start_rows<Tensor<with(L, A, Place::T)>>(A, send, recv, back, rows);
}
template <Axes A, auto L>
auto to_owners(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
               const std::vector<std::int64_t>& recv) {
  static_assert(are_at_experts<A, L>());
  return raw::exchange_rows<Tensor<with(L, A, Place::T)>>(A, send, recv, rows);
}

/// E or P -> T of rows that are not computed (attach.h), as what becomes of them at home. Their
/// gradient is here already: nothing travels, forward or backward.
template <Axes A, auto L>
auto at_home(const Tensor<L>& rows, const Tensor<adjoint(L)>& gradient, at::IntArrayRef sizes) {
  constexpr auto checked = [] {
    if (on(L, A) != Place::E && on(L, A) != Place::P)
      throw "at_home is what becomes of rows at their experts (E), or of terms of a sum (P)";
    return true;
  }();
  static_assert(checked);
  return Tensor<with(L, A, Place::T)>::assume(
      raw::attach(rows.local(), raw::not_computed(sizes, rows.local()),
                  [gradient](const at::Tensor&) { return gradient.local(); }));
}

/// Rows between T and E on ep: they are on a node of their experts, on any rank of it. They may be
/// moved, sorted and summed there; code that computes with them has forgotten one of the two hops.
/// L is their layout at home.
template <auto L>
class AtNode {
 public:
  static constexpr auto layout = L;
  static AtNode assume(at::Tensor rows) { return AtNode(std::move(rows)); }
  const at::Tensor& local() const { return rows_; }

 private:
  explicit AtNode(at::Tensor rows) : rows_(std::move(rows)) {}
  at::Tensor rows_;
};
template <auto L>
const at::Tensor& local(const AtNode<L>& rows) {
  return rows.local();
}
template <class Fn, class Adjoint, auto L>
AtNode<L> map_linear(Fn f, Adjoint adjoint, const AtNode<L>& rows) {
  return AtNode<L>::assume(raw::map_linear(rows.local(), f, adjoint));
}

/// T -> at the node: send[n] rows go to node n of ep, to the rank in the same place there.
/// Backward: to_owners.
template <TypedRows... Parts>
auto start_to_nodes(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv,
                    const Parts&... rows) {
  constexpr auto checked = [] {
    if (((on(Parts::layout, ep) != Place::T) || ...))
      throw "to_nodes takes token rows (T) to the nodes that have their experts";
    return true;
  }();
  static_assert(checked);
  return raw::start_rows<raw::AsPart<Parts, AtNode<Parts::layout>>...>(ep_nodes, send, recv,
                                                                       nullptr, rows...);
}
/// At the node -> E: send[r] rows go to rank r of ep on this node. Backward: to_node.
template <RowsAtNode... Parts>
auto start_to_experts(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv,
                      const Parts&... rows) {
  return raw::start_rows<raw::AsPart<Parts, Tensor<with(Parts::layout, ep, Place::E)>>...>(
      ep_inside, send, recv, nullptr, rows...);
}
/// E -> at the node: the way back to the rank of the node from which the rows came. Backward:
/// to_experts, of gradients by the codec.
template <auto L>
auto start_to_node(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
                   const std::vector<std::int64_t>& recv, const Codec& back = {}) {
  constexpr auto checked = [] {
    if (on(L, ep) != Place::E) throw "to_node brings rows (E) back from the experts of a node";
    return true;
  }();
  static_assert(checked);
  return raw::start_rows<AtNode<with(L, ep, Place::T)>>(ep_inside, send, recv, back, rows);
}
/// At the node -> T: the way home. Backward: to_nodes, of gradients by the codec.
template <auto L>
auto start_to_owners(const AtNode<L>& rows, const std::vector<std::int64_t>& send,
                     const std::vector<std::int64_t>& recv, const Codec& back = {}) {
  return raw::start_rows<Tensor<L>>(ep_nodes, send, recv, back, rows);
}

}  // namespace moesh
