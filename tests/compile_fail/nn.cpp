// Mistakes with what the router gives that must not compile; see spmd.cpp.
#include "moesh/nn/router.h"
#include "moesh/spmd/spmd.h"

namespace moesh::nn {

using enum Place;

#if defined(FAIL_bias_moved_by_own_counts)
// expect: this value is still a partial sum (P): all_reduce<axis> first
at::Tensor load(const Router& router) { return whole(router.pending_counts()); }
#else
at::Tensor load(const Router& router) {
  return whole(all_reduce<kTokenAxes>(router.pending_counts()));
}
#endif

#if defined(FAIL_bias_moved_by_the_counts_of_tp)
// expect: this value is still a partial sum (P): all_reduce<axis> first
at::Tensor load_of_tp(const Router& router) {
  return whole(all_reduce<tp>(router.pending_counts()));
}
#else
at::Tensor load_of_tp(const Router& router) {
  return whole(all_reduce<kTokenAxes>(router.pending_counts()));
}
#endif

#if defined(FAIL_own_counts_restored_as_those_of_all)
// expect: Dense{Place::P, Place::P, Place::P}
void restore(Router& router, const Route& route) { router.set_pending_counts(route.counts_E); }
#else
void restore(Router& router, const Route& route) {
  router.set_pending_counts(all_reduce<kTokenAxes>(route.counts_E));
}
#endif

#if defined(FAIL_routing_map_as_the_load)
// expect: this value is still a partial sum (P): all_reduce<axis> first
at::Tensor load_by_map(const Route& route) {
  return whole(sum<Over::tokens>(one_hot(route.experts_NK, 8)));
}
#else
at::Tensor load_by_map(const Route& route) {
  return whole(all_reduce<kTokenAxes>(sum<Over::tokens>(one_hot(route.experts_NK, 8))));
}
#endif

#if defined(FAIL_mask_of_the_span_for_own_tokens)
// expect: no match for 'operator='
void mark(Route& route, const Tensor<Dense{T, T, R}>& valid) { route.valid_N1 = valid; }
#else
void mark(Route& route, const Tensor<Dense{T, T, R}>& valid) {
  route.valid_N1 = keep<tp>(valid, {.dim = 0});
}
#endif

}  // namespace moesh::nn
