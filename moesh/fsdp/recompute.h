#pragma once
// Activation recompute: memory for a second forward pass. What is expensive to compute can be kept
// from the first pass.

#include <any>
#include <functional>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "moesh/spmd/attach.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/tensor.h"

namespace moesh {

/// Values that a recompute keeps of its first run besides its input.
enum class Keep { nothing, expensive };

namespace raw {
std::vector<at::Tensor> recompute(
    std::function<std::vector<at::Tensor>(const at::Tensor& x, bool again)> f, const at::Tensor& x,
    Keep keep);

/// For an expensive computation. In the second run of a recompute that keeps: the tensors that the
/// first run gave to `keep` at this place. Elsewhere it returns nothing; then the caller computes
/// them and calls `keep`. `what` is the same in both.
std::optional<std::vector<at::Tensor>> recall(std::string_view what);
void keep(std::string_view what, const std::vector<at::Tensor>& results);

/// Whether a second run goes on, which makes the graph that backward takes. What no gradient needs,
/// such as the last values before the end of f, can be not_computed (attach.h) there.
bool is_second_run();
/// There: the gradient of the first result of f, so that it can be on its way before backward comes
/// to it. Else undefined.
at::Tensor coming_gradient();

std::any computed_once(const std::function<std::any()>& f);

at::Tensor kept_linear(const at::Tensor& x, const at::Tensor& w, const OwnProducts& own);
}  // namespace raw

/// Runs f(x, false) and keeps none of its intermediate values, except those that its parts give to
/// raw::keep; backward runs f(x, true). f returns a tuple of typed tensors, which may depend on x
/// and on parameters; an undefined one stays undefined. Every rank recomputes in the same order, so
/// f may contain collectives.
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

/// f(), which the second run of a recompute takes from the first one: for something small that
/// ranks agree upon, such as counts on the host.
template <class Fn>
auto computed_once(Fn f) {
  return std::any_cast<std::invoke_result_t<Fn&>>(
      raw::computed_once([&] { return std::any(f()); }));
}

/// raw::coming_gradient(), where the first result is a Tensor<L>.
template <auto L>
std::optional<Tensor<adjoint(L)>> coming_gradient() {
  const at::Tensor gradient = raw::coming_gradient();
  return gradient.defined() ? std::optional(Tensor<adjoint(L)>::assume(gradient)) : std::nullopt;
}

/// linear(x, w), whose result is kept by a recompute that keeps values.
template <auto A, auto B>
auto kept_linear(const Tensor<A>& x, const Tensor<B>& w, const OwnProducts& own = {}) {
  constexpr auto out = mix(Op::linear, A, B);
  return assume<out>(raw::kept_linear(x.local(), w.local(), of_whole_gradients<out>(own)));
}

}  // namespace moesh
