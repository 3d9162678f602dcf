#pragma once
// Several tensors with the same rows in one message: rows, their scores, their experts. A row of
// the message is the bytes of its parts side by side, so that each keeps its dtype and its bits.
// To experts, wide rows travel by themselves beside it.
// Gradients travel the same way. Where they are terms of a sum, the receiver adds them, in the
// order of the ranks and in float32 or wider, and rounds once: what a reduction does.

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

/// The rows of all tensors in one message.
template <class... Out, class... In>
Moving<Out...> start_rows(Axes axes, const std::vector<std::int64_t>& send,
                          const std::vector<std::int64_t>& recv, const In&... rows) {
  const Tensors xs{rows.local()...};
  return Moving<Out...>(StartedStep(xs, move_rows(xs[0], axes, send, recv)));
}
template <class... Out, class... In>
auto exchange_rows(Axes axes, const std::vector<std::int64_t>& send,
                   const std::vector<std::int64_t>& recv, const In&... rows) {
  const Tensors xs{rows.local()...};
  return typed_results<Out...>(run_pair(xs, move_rows(xs[0], axes, send, recv)));
}
}  // namespace raw

/// S -> R of several tensors [rows[r], ..] in one message; backward: one message, P -> S.
template <Axes A, auto... Ls>
auto start_all_gather_together(const std::vector<std::int64_t>& rows, const Tensor<Ls>&... xs) {
  return Moving<Tensor<transition(Ls, A, Place::R, Step::all_gather)>...>(
      raw::StartedStep({xs.local()...}, raw::gather_together(A, rows)));
}
template <Axes A, auto... Ls>
auto all_gather_together(const std::vector<std::int64_t>& rows, const Tensor<Ls>&... xs) {
  return raw::typed_results<Tensor<transition(Ls, A, Place::R, Step::all_gather)>...>(
      raw::run_pair({xs.local()...}, raw::gather_together(A, rows)));
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
template <Axes A, auto... Ls>
auto start_to_experts(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv,
                      const Tensor<Ls>&... rows) {
  static_assert(are_at_home<A, Ls...>());
  return raw::start_rows<Tensor<with(Ls, A, Place::E)>...>(A, send, recv, rows...);
}
template <Axes A, auto L>
auto to_experts(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
                const std::vector<std::int64_t>& recv) {
  static_assert(are_at_home<A, L>());
  return raw::exchange_rows<Tensor<with(L, A, Place::E)>>(A, send, recv, rows);
}

/// E -> T: the way back; here `send` and `recv` are what to_experts received and sent. Backward:
/// to_experts.
template <Axes A, auto L>
auto start_to_owners(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
                     const std::vector<std::int64_t>& recv) {
  static_assert(are_at_experts<A, L>());
  return raw::start_rows<Tensor<with(L, A, Place::T)>>(A, send, recv, rows);
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
template <auto... Ls>
auto start_to_nodes(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv,
                    const Tensor<Ls>&... rows) {
  constexpr auto checked = [] {
    if (((on(Ls, ep) != Place::T) || ...))
      throw "to_nodes takes token rows (T) to the nodes that have their experts";
    return true;
  }();
  static_assert(checked);
  return raw::start_rows<AtNode<Ls>...>(ep_nodes, send, recv, rows...);
}
/// At the node -> E: send[r] rows go to rank r of ep on this node. Backward: to_node.
template <auto... Ls>
auto start_to_experts(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv,
                      const AtNode<Ls>&... rows) {
  return raw::start_rows<Tensor<with(Ls, ep, Place::E)>...>(ep_inside, send, recv, rows...);
}
/// E -> at the node: the way back to the rank of the node from which the rows came. Backward:
/// to_experts.
template <auto L>
auto start_to_node(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
                   const std::vector<std::int64_t>& recv) {
  constexpr auto checked = [] {
    if (on(L, ep) != Place::E) throw "to_node brings rows (E) back from the experts of a node";
    return true;
  }();
  static_assert(checked);
  return raw::start_rows<AtNode<with(L, ep, Place::T)>>(ep_inside, send, recv, rows);
}
/// At the node -> T: the way home. Backward: to_nodes.
template <auto L>
auto start_to_owners(const AtNode<L>& rows, const std::vector<std::int64_t>& send,
                     const std::vector<std::int64_t>& recv) {
  return raw::start_rows<Tensor<L>>(ep_nodes, send, recv, rows);
}

}  // namespace moesh
