#pragma once
// The ways to dispatch, and what those have in common that bring a rank's own tokens home.

#include <functional>
#include <memory>

#include "moesh/nn/dispatch.h"

namespace moesh::nn {

std::unique_ptr<const Dispatch> make_local();
std::unique_ptr<const Dispatch> make_all_to_all();
std::unique_ptr<const Dispatch> make_all_gather();
std::unique_ptr<const Dispatch> make_all_gather_over_tp();

/// How the flat tokens [N, D] inside the layer are cut over tp.
Along rows_over_tp(const Tokens& tokens);

/// The chosen experts as they travel, in half the bytes, and what came of them.
PerToken numbers(const Route& route);
template <auto L>
at::Tensor experts_of(const Tensor<L>& numbers_NK) {
  return local(numbers_NK).to(at::kLong);
}

/// Takes own tokens to their experts and back home; the shared experts work while rows are on their
/// way.
class RoundTrip : public Dispatch {
 public:
  Stream<true> operator()(const DispatchInput& in, const Stream<true>& x_ND) const final;
  Stream<false> operator()(const DispatchInput& in, const Stream<false>& x_ND) const final;

 private:
  /// The outputs of the routed experts. `meanwhile` is called once, while rows travel.
  virtual PerToken routed(const DispatchInput& in,
                          const std::function<void()>& meanwhile) const = 0;
};

}  // namespace moesh::nn
