#pragma once
// Activation recompute: memory for a second forward pass.

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "moesh/spmd/tensor.h"

namespace moesh {

namespace raw {
std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const at::Tensor& x, bool again)> f, const at::Tensor& x);
}

/// Runs f(x, false) without keeping anything of its inside, and f(x, true) once more in backward. f
/// returns a tuple of typed tensors, which may depend on x and on parameters; an undefined one
/// stays undefined. Every rank recomputes in the same order, so f may hold collectives.
template <class Fn, auto L>
auto recompute(Fn f, const Tensor<L>& x) {
  using Results = std::invoke_result_t<Fn&, const Tensor<L>&, bool>;
  const auto plain = raw::recompute(
      [f = std::move(f)](const at::Tensor& input, bool again) {
        const auto plain_of = [](const auto&... y) {
          return std::vector<at::Tensor>{y.local()...};
        };
        return std::apply(plain_of, f(assume<L>(input), again));
      },
      x.local());
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return Results{std::tuple_element_t<i, Results>::assume(plain[i])...};
  }(std::make_index_sequence<std::tuple_size_v<Results>>());
}

}  // namespace moesh
