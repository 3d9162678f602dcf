// Mistakes with what the router gives, and with LoRA, that must not compile; see spmd.cpp.
#include "moesh/fsdp/fsdp.h"
#include "moesh/nn/linear.h"
#include "moesh/nn/router.h"

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

// LoRA of a weight that is cut by rows: A is cut as it is, and B is whole.

using Hidden = Tensor<Dense{T, T, F}>;

#if defined(FAIL_lora_b_cut_behind_a_partial_sum)
// expect: a partial sum (P) times a shard
auto add(const Hidden& h, const Cut& a, const Cut& b) { return linear(linear(h, use(a)), use(b)); }
#else
auto add(const Hidden& h, const Cut& a, const Uncut& b) {
  return linear(linear(h, use(a)), use(b));
}
#endif

#if defined(FAIL_lora_a_whole_before_a_slice)
// expect: x has a slice of the features, the weight has all
auto narrowed(const Hidden& h, const Uncut& a) { return linear(h, use(a)); }
#else
auto narrowed(const Hidden& h, const Cut& a) { return linear(h, use(a)); }
#endif

#if defined(FAIL_lora_added_to_a_whole_output)
// expect: a partial sum (P) plus a whole value
auto added(const Tensor<Dense{T, T, R}>& y, const Hidden& h, const Cut& a, const Uncut& b) {
  return y + linear(linear(h, use(a)), use(b));
}
#else
auto added(const Tensor<Dense{T, T, P}>& y, const Hidden& h, const Cut& a, const Uncut& b) {
  return y + linear(linear(h, use(a)), use(b));
}
#endif

}  // namespace moesh::nn
