#pragma once
// Activation recompute: memory for a second forward pass. What is expensive to compute can be kept
// from the first pass.

#include <functional>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "moesh/spmd/tensor.h"

namespace moesh {

/// Values that a recompute keeps of its first run besides its input.
enum class Keep { nothing, expensive };

namespace raw {
std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const at::Tensor& x, bool again)> f, const at::Tensor& x,
    Keep keep);

/// For the forward of what is expensive. In the second run of a recompute that keeps: what the
/// first run gave to `keep` at this place; elsewhere nothing, and the caller computes, and calls
/// `keep`. `what` is the same in both.
std::optional<std::vector<at::Tensor>> recall(std::string_view what);
void keep(std::string_view what, const std::vector<at::Tensor>& results);

/// Stands for a result that the second run need not compute: the last ones before the end of f,
/// whose values no gradient needs. NaN, without memory: a gradient that does need it shows.
at::Tensor not_computed(at::IntArrayRef sizes, const at::TensorOptions& options);

at::Tensor kept_linear(const at::Tensor& x, const at::Tensor& w);
}  // namespace raw

/// Runs f(x, false) without keeping anything of its inside, or only what its parts give to
/// raw::keep, and f(x, true) once more in backward. f returns a tuple of typed tensors, which may
/// depend on x and on parameters; an undefined one stays undefined. Every rank recomputes in the
/// same order, so f may hold collectives.
template <class Fn, auto L>
auto recompute(Fn f, const Tensor<L>& x, Keep keep = Keep::nothing) {
  using Results = std::invoke_result_t<Fn&, const Tensor<L>&, bool>;
  const auto plain = raw::recompute(
      [f = std::move(f)](const at::Tensor& input, bool again) {
        const auto plain_of = [](const auto&... y) {
          return std::vector<at::Tensor>{y.local()...};
        };
        return std::apply(plain_of, f(assume<L>(input), again));
      },
      x.local(), keep);
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return Results{std::tuple_element_t<i, Results>::assume(plain[i])...};
  }(std::make_index_sequence<std::tuple_size_v<Results>>());
}

/// linear(x, w), of which a recompute that keeps keeps the result.
template <auto A, auto B>
auto kept_linear(const Tensor<A>& x, const Tensor<B>& w) {
  constexpr auto out = mix(Op::linear, A, B);
  return assume<out>(raw::kept_linear(x.local(), w.local()));
}

}  // namespace moesh
