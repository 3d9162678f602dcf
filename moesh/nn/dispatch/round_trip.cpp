#include <optional>

#include "moesh/nn/dispatch/ways.h"
#include "moesh/nn/residual.h"

namespace moesh::nn {

Along rows_over_tp(const Tokens& tokens) {
  return {.dim = 0, .sizes = tokens.rows(*current_mesh().group(tp))};
}

PerToken numbers(const Route& route) { return cast(route.experts_NK, at::kInt); }

Stream<true> RoundTrip::operator()(const DispatchInput& in, const Stream<true>& x_ND) const {
  const Along rows = rows_over_tp(in.tokens);
  Stream<true> shared;
  const PerToken y = routed(in, [&] {
    if (in.shared) shared = to_stream<true>((*in.shared)(to_full<true>(x_ND, rows)), rows);
  });
  return in.shared ? y + shared : y;
}

Stream<false> RoundTrip::operator()(const DispatchInput& in, const Stream<false>& x_ND) const {
  const Along rows = rows_over_tp(in.tokens);
  std::optional<Sum> shared;
  const PerToken y = routed(in, [&] {
    if (in.shared) shared = (*in.shared)(to_full<false>(x_ND, rows));
  });
  // One reduction ends both.
  return shared ? to_stream<false>(*shared + pad<tp>(y, rows), rows)
                : all_gather<tp, Place::I>(y, rows);
}

}  // namespace moesh::nn
