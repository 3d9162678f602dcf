#pragma once
#include <vector>

#include "moesh/spmd/raw.h"
#include "moesh/spmd/tensor.h"
#include "moesh/spmd/together.h"

namespace moesh {

/// Rows that are on their way: other work goes on until `wait`.
template <auto... Ls>
class [[nodiscard]] Moving {
 public:
  explicit Moving(raw::RowExchange exchange) : exchange_(std::move(exchange)) {}
  std::tuple<Tensor<Ls>...> wait() { return typed_parts<Tensor<Ls>...>(exchange_.wait()); }

 private:
  raw::RowExchange exchange_;
};

/// T -> E: send[r] rows (dimension 0) go to rank r of the axes, recv[r] come from it; those of all
/// tensors in one message. Backward: to_owners.
template <Axes A, auto... Ls>
auto start_to_experts(const std::vector<std::int64_t>& send, const std::vector<std::int64_t>& recv,
                      const Tensor<Ls>&... rows) {
  constexpr auto checked = [] {
    if (((on(Ls, A) != Place::T) || ...))
      throw "to_experts takes token rows (T) to the ranks that hold their experts";
    return true;
  }();
  static_assert(checked);
  return Moving<with(Ls, A, Place::E)...>(raw::RowExchange({rows.local()...}, A, send, recv));
}
template <Axes A, auto L>
auto to_experts(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
                const std::vector<std::int64_t>& recv) {
  return std::get<0>(start_to_experts<A>(send, recv, rows).wait());
}

/// E -> T: the way back; here `send` and `recv` are what to_experts received and sent. Backward:
/// to_experts.
template <Axes A, auto L>
auto to_owners(const Tensor<L>& rows, const std::vector<std::int64_t>& send,
               const std::vector<std::int64_t>& recv) {
  constexpr auto checked = [] {
    if (on(L, A) != Place::E) throw "to_owners brings rows (E) home from their experts";
    return true;
  }();
  static_assert(checked);
  return assume<with(L, A, Place::T)>(raw::RowExchange({rows.local()}, A, send, recv).wait()[0]);
}

}  // namespace moesh
