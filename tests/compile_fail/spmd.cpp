// Mistakes of parallel programs that must not compile, each with the sentence that the compiler
// then shows. The #else branch is the cure which the sentence names: the control compiles them all.
#include "moesh/fsdp/fsdp.h"

#include "moesh/nn/norm.h"

namespace moesh {

using enum Place;

using Shards = Tensor<Dense{T, T, T}>;       // every rank holds its own tokens
using Full = Tensor<Dense{T, T, R}>;         // all tokens of the tp ranks
using Columns = Tensor<Dense{T, T, F}>;      // ... and a slice of the features
using Sum = Tensor<Dense{T, T, P}>;          // ... and a sum over tp not yet taken
using Residual = Tensor<Dense{T, T, I}>;     // the residual stream without sequence parallelism
using Whole = Tensor<Dense{R, R, R}>;        // the same on every rank
using Pending = Tensor<Dense{P, P, P}>;      // a sum over all ranks not yet taken
using Rows = Tensor<Sparse{T, T, T}>;        // rows of the routed experts, still at their owners
using ExpertRows = Tensor<Sparse{T, E, R}>;  // ... at their experts
using ExpertWeight =
    Param<Sparse{I, E, F}>;                // this rank's experts, a slice of their hidden dimension
using Weight = Param<Dense{I, I, F}>;      // a linear layer cut over tp
using NormWeight = Param<Dense{I, I, I}>;  // the same on every rank
using Splits = std::vector<std::int64_t>;

// Functions of rows, on plain tensors.
at::Tensor plus_epsilon(const at::Tensor& x);
at::Tensor softmax(const at::Tensor& x);
at::Tensor multiply(const at::Tensor& x, const at::Tensor& factor);

// Parameters enter work.

#if defined(FAIL_parameter_not_entered)
// expect: a parameter enters through use(w)
auto column(const Full& x, const Weight& w) { return linear(x, value(w)); }
#else
auto column(const Full& x, const Weight& w) { return linear(x, use(w)); }
#endif

#if defined(FAIL_parameter_used_replicated)
// expect: a parameter is I, F or E on each axis: it enters work (R) through use(w)
auto declared(const Param<Dense{I, I, R}>& w) { return use(w); }
#else
auto declared(const NormWeight& w) { return use(w); }
#endif

#if defined(FAIL_invariant_residual_in_split_work)
// expect: any other value through enter<axis>(x)
auto attend(const Residual& x, const Weight& w) { return linear(x, use(w)); }
#else
auto attend(const Residual& x, const Weight& w) { return linear(enter<tp>(x), use(w)); }
#endif

#if defined(FAIL_invariant_residual_plus_shard)
// expect: an invariant value (I) takes no part in split work
auto residual_plus(const Residual& x, const Shards& y) { return x + y; }
#else
auto residual_plus(const Residual& x, const Sum& y) { return x + all_reduce<tp, I>(y); }
#endif

#if defined(FAIL_enter_twice)
// expect: enter takes an invariant value (I); this one is in split work already
auto enter_twice(const Residual& x) { return enter<tp>(enter<tp>(x)); }
#else
auto enter_once(const Residual& x) { return enter<tp>(x); }
#endif

// Partial sums.

#if defined(FAIL_partial_plus_replicated)
// expect: add once<axis>(value)
auto add_whole(const Sum& a, const Full& b) { return a + b; }
#else
auto add_whole(const Sum& a, const Full& b) { return all_reduce<tp>(a) + b; }
#endif

#if defined(FAIL_bias_added_before_the_reduction)
// expect: counts it once per rank
// expect: add once<axis>(value)
auto row_with_bias(const Columns& x, const Weight& w, const NormWeight& bias) {
  return linear(x, use(w)) + use(bias);
}
#else
auto row_with_bias(const Columns& x, const Weight& w, const NormWeight& bias) {
  return linear(x, use(w)) + once<tp>(use(bias));
}
#endif

#if defined(FAIL_partial_plus_shard)
// expect: pad<axis>(shard)
auto shared_plus_routed(const Sum& shared, const Shards& routed) { return shared + routed; }
#else
auto shared_plus_routed(const Sum& shared, const Shards& routed) {
  return shared + pad<tp>(routed, {.dim = 0});
}
#endif

#if defined(FAIL_partial_times_partial)
// expect: all_reduce<axis> one first
auto balance_loss(const Pending& counts, const Pending& scores) { return counts * scores; }
#else
auto balance_loss(const Pending& counts, const Pending& scores) {
  return all_reduce<kTokenAxes>(counts) * scores;
}
#endif

#if defined(FAIL_partial_times_shard)
// expect: a partial sum (P) times a shard: all_reduce<axis> or reduce_scatter<axis> the sum first
auto gated(const Sum& y, const Shards& gate) { return y * gate; }
#else
auto gated(const Sum& y, const Shards& gate) { return reduce_scatter<tp>(y, {.dim = 0}) * gate; }
#endif

#if defined(FAIL_nonlinear_on_partial)
// expect: all_reduce<axis> or reduce_scatter<axis> first
auto activate(const Columns& x, const Weight& w) { return silu(linear(x, use(w))); }
#else
auto activate(const Columns& x, const Weight& w) { return silu(all_reduce<tp>(linear(x, use(w)))); }
#endif

#if defined(FAIL_partial_plus_scalar)
// expect: a nonlinear function of a partial sum (P)
auto shift(const Sum& x) { return map_rows(plus_epsilon, x); }
#else
auto shift(const Sum& x) { return map_rows(plus_epsilon, all_reduce<tp>(x)); }
#endif

#if defined(FAIL_softmax_of_partial)
// expect: all_reduce<axis> or reduce_scatter<axis> first
auto probabilities(const Sum& logits) { return map_rows(softmax, logits); }
#else
auto probabilities(const Sum& logits) { return map_rows(softmax, all_reduce<tp>(logits)); }
#endif

#if defined(FAIL_all_gather_of_partial)
// expect: all_gather of a partial sum (P): all_reduce or reduce_scatter<axis> instead
auto gather_sum(const Sum& x) { return all_gather<tp>(x, {.dim = 0}); }
#else
auto gather_sum(const Sum& x) { return all_reduce<tp>(x); }
#endif

#if defined(FAIL_all_gather_of_whole)
// expect: nothing to gather
auto gather_twice(const Shards& x) {
  return all_gather<tp>(all_gather<tp>(x, {.dim = 0}), {.dim = 0});
}
#else
auto gather_once(const Shards& x) { return all_gather<tp>(x, {.dim = 0}); }
#endif

#if defined(FAIL_reduction_of_token_shard)
// expect: a rank's own sum becomes one by as_term<axis>(x)
auto total(const Tensor<Dense{R, R, T}>& counts) { return all_reduce<tp>(counts); }
#else
auto total(const Tensor<Dense{R, R, T}>& counts) { return all_reduce<tp>(as_term<tp>(counts)); }
#endif

#if defined(FAIL_reduced_twice)
// expect: a reduction of something that is not a partial sum (P)
auto reduce_twice(const Sum& x) { return all_reduce<tp>(all_reduce<tp>(x)); }
#else
auto reduce_once(const Sum& x) { return all_reduce<tp>(x); }
#endif

#if defined(FAIL_as_term_of_replicated)
// expect: a whole value becomes a term by once<axis>(x)
auto term(const Full& x) { return as_term<tp>(x); }
#else
auto term(const Full& x) { return once<tp>(x); }
#endif

#if defined(FAIL_missing_reduce_scatter_at_exit)
// expect: Dense{Place::T, Place::T, Place::P}
// expect: Dense{Place::T, Place::T, Place::T}
Shards mlp(const Shards& x, const Weight& w1, const Weight& w2) {
  return linear(silu(linear(all_gather<tp>(x, {.dim = 0}), use(w1))), use(w2));
}
#else
Shards mlp(const Shards& x, const Weight& w1, const Weight& w2) {
  return reduce_scatter<tp>(linear(silu(linear(all_gather<tp>(x, {.dim = 0}), use(w1))), use(w2)),
                            {.dim = 0});
}
#endif

// What varies must be the same thing.

#if defined(FAIL_forgotten_gather)
// expect: the forgotten gather: all_gather<axis>(x) first
auto project(const Shards& x, const Weight& w) { return linear(x, use(w)); }
#else
auto project(const Shards& x, const Weight& w) {
  return linear(all_gather<tp>(x, {.dim = 0}), use(w));
}
#endif

#if defined(FAIL_forgotten_all_to_all)
// expect: the forgotten all-to-all: to_experts<axis>(x) first
auto expert(const Rows& rows, const ExpertWeight& w, const Splits&, const Splits&) {
  return linear(all_gather<etp>(rows, {.dim = 0}), use(w));
}
#else
auto expert(const Rows& rows, const ExpertWeight& w, const Splits& send, const Splits& recv) {
  return linear(all_gather<etp>(to_experts<ep>(rows, send, recv), {.dim = 0}), use(w));
}
#endif

#if defined(FAIL_forgotten_second_hop)
// expect: AtNode<Sparse
auto expert_of_node(const Rows& rows, const ExpertWeight& w, const Splits& send,
                    const Splits& recv) {
  const auto at_node = start_to_nodes(send, recv, rows).wait();
  return linear(all_gather<etp>(at_node, {.dim = 0}), use(w));
}
#else
auto expert_of_node(const Rows& rows, const ExpertWeight& w, const Splits& send,
                    const Splits& recv) {
  const auto at_node = start_to_nodes(send, recv, rows).wait();
  const auto at_expert = start_to_experts(send, recv, at_node).wait();
  return linear(all_gather<etp>(at_expert, {.dim = 0}), use(w));
}
#endif

#if defined(FAIL_computing_with_rows_under_way)
// expect: Moving<
auto expert_at_once(const Rows& rows, const ExpertWeight& w, const Splits& send,
                    const Splits& recv) {
  auto at_experts = start_to_experts<ep>(send, recv, rows);
  return linear(all_gather<etp>(at_experts, {.dim = 0}), use(w));
}
#else
auto expert_at_once(const Rows& rows, const ExpertWeight& w, const Splits& send,
                    const Splits& recv) {
  auto at_experts = start_to_experts<ep>(send, recv, rows);
  return linear(all_gather<etp>(at_experts.wait(), {.dim = 0}), use(w));
}
#endif

#if defined(FAIL_rows_that_nobody_awaits)
// expect: -Werror=unused-result
void never_awaited(const ExpertRows& rows, const Splits& send, const Splits& recv) {
  start_to_owners<ep>(rows, send, recv);
}
#else
auto never_awaited(const ExpertRows& rows, const Splits& send, const Splits& recv) {
  return start_to_owners<ep>(rows, send, recv).wait();
}
#endif

#if defined(FAIL_computing_with_codes)
// expect: Coded<
auto expert_of_codes(const Rows& rows, const Codec& codec, const ExpertWeight& w,
                     const Splits& send, const Splits& recv) {
  const auto at_experts = start_to_experts<ep>(send, recv, coded(rows, codec)).wait();
  return linear(all_gather_together<etp>(recv, at_experts), use(w));
}
#else
auto expert_of_codes(const Rows& rows, const Codec& codec, const ExpertWeight& w,
                     const Splits& send, const Splits& recv) {
  const auto at_experts = start_to_experts<ep>(send, recv, coded(rows, codec)).wait();
  return linear(decoded(all_gather_together<etp>(recv, at_experts)), use(w));
}
#endif

#if defined(FAIL_outputs_home_in_codes)
// expect: no matching function for call to
auto outputs_home(const ExpertRows& rows, const Codec& codec, const Splits& send,
                  const Splits& recv) {
  return start_to_owners<ep>(coded(rows, codec), send, recv).wait();
}
#else
auto outputs_home(const ExpertRows& rows, const Codec& codec, const Splits& send,
                  const Splits& recv) {
  return start_to_owners<ep>(rows, send, recv, codec).wait();
}
#endif

#if defined(FAIL_parts_of_a_sum_in_codes)
// expect: a nonlinear function of a partial sum (P)
auto sum_in_codes(const Sum& y, const Codec& codec) { return coded(y, codec); }
#else
auto sum_in_codes(const Sum& y, const Codec& codec) {
  return coded(reduce_scatter<tp>(y, {.dim = 0}), codec);
}
#endif

#if defined(FAIL_codes_of_a_gradient_that_is_a_part)
// expect: a nonlinear function of a partial sum (P)
auto with_parts_in_codes(const Full& y, const Codec& codec) {
  return with_coded_gradient(y, codec);
}
#else
auto with_parts_in_codes(const Shards& y, const Codec& codec) {
  return with_coded_gradient(y, codec);
}
#endif

#if defined(FAIL_whole_weight_on_feature_slice)
// expect: make it F (row), or all_gather<axis>(x) first
auto output(const Columns& x, const NormWeight& w) { return linear(x, use(w)); }
#else
auto output(const Columns& x, const Weight& w) { return linear(x, use(w)); }
#endif

#if defined(FAIL_token_shard_plus_feature_slice)
// expect: different things vary over the ranks (tokens T, features F, experts E)
auto mixed(const Shards& x, const Columns& y) { return x + y; }
#else
auto mixed(const Shards& x, const Columns& y) {
  return all_gather<tp>(x, {.dim = 0}) + all_gather<tp>(y, {.dim = 1});
}
#endif

#if defined(FAIL_to_experts_of_replicated)
// expect: to_experts takes token rows (T)
auto dispatch(const Tensor<Sparse{T, R, T}>& rows, const Splits& send, const Splits& recv) {
  return to_experts<ep>(rows, send, recv);
}
#else
auto dispatch(const Rows& rows, const Splits& send, const Splits& recv) {
  return to_experts<ep>(rows, send, recv);
}
#endif

#if defined(FAIL_partial_scores_gathered_with_their_rows)
// expect: all_gather of a partial sum (P): all_reduce or reduce_scatter<axis> instead
auto rows_and_scores(const Shards& rows, const Sum& scores, const Splits& sizes) {
  return all_gather_together<tp>(sizes, rows, scores);
}
#else
auto rows_and_scores(const Shards& rows, const Shards& scores, const Splits& sizes) {
  return all_gather_together<tp>(sizes, rows, scores);
}
#endif

#if defined(FAIL_keys_fetched_that_are_there)
// expect: gather_ranges takes a rank's own tokens (T)
auto keys(const Tensor<Dense{T, R, F}>& k, const RangesOfRanks& seen) {
  return gather_ranges<cp>(k, seen);
}
#else
auto keys(const Columns& k, const RangesOfRanks& seen) { return gather_ranges<cp>(k, seen); }
#endif

#if defined(FAIL_softmax_over_sharded_vocabulary)
// expect: this rank holds a slice (F): all_gather<axis>(x) first
auto vocabulary(const Columns& logits) { return map_rows(softmax, logits); }
#else
auto vocabulary(const Columns& logits) {
  return map_rows(softmax, all_gather<tp>(logits, {.dim = 1}));
}
#endif

#if defined(FAIL_norm_over_sharded_features)
// expect: a norm, softmax or top-k over features needs all of them
auto norm(const Columns& x, const NormWeight& w) { return nn::rms_norm(x, use(w), 1e-6); }
#else
auto norm(const Columns& x, const NormWeight& w) {
  return nn::rms_norm(all_gather<tp>(x, {.dim = 1}), use(w), 1e-6);
}
#endif

#if defined(FAIL_sum_over_a_numbered_dimension)
// expect: dimensions are named by what they hold
auto feature_sums(const Shards& x) { return sum<Over::features>(x, {0}); }
#else
auto feature_sums(const Shards& x) { return sum<Over::features>(x); }
#endif

#if defined(FAIL_map_of_a_slice_of_the_experts)
// expect: this rank holds a slice (F): all_gather<axis>(x) first
auto routing_map(const Columns& chosen) { return one_hot(chosen, 8); }
#else
auto routing_map(const Columns& chosen) { return one_hot(all_gather<tp>(chosen, {.dim = 1}), 8); }
#endif

#if defined(FAIL_map_of_a_partial_sum)
// expect: a nonlinear function of a partial sum (P)
auto group_mask(const Sum& kept) { return one_hot(kept, 4); }
#else
auto group_mask(const Sum& kept) { return one_hot(all_reduce<tp>(kept), 4); }
#endif

#if defined(FAIL_row_function_of_rows_and_experts)
// expect: different things vary over the ranks
auto weigh(const Tensor<Sparse{T, E, R}>& rows, const Rows& scores) {
  return map_heads(multiply, rows, scores);
}
#else
auto weigh(const ExpertRows& rows, const ExpertRows& scores) {
  return map_heads(multiply, rows, scores);
}
#endif

#if defined(FAIL_recompute_changes_the_layout)
// expect: Dense{Place::T, Place::T, Place::P}
Shards again(const Shards& x, const Weight& w1, const Weight& w2) {
  return std::get<0>(recompute(
      [&](const Shards& in, bool) {
        return std::tuple(linear(linear(all_gather<tp>(in, {.dim = 0}), use(w1)), use(w2)));
      },
      x));
}
#else
Sum again(const Shards& x, const Weight& w1, const Weight& w2) {
  return std::get<0>(recompute(
      [&](const Shards& in, bool) {
        return std::tuple(linear(linear(all_gather<tp>(in, {.dim = 0}), use(w1)), use(w2)));
      },
      x));
}
#endif

// The two views.

#if defined(FAIL_dense_plus_sparse)
// expect: a dense and a sparse tensor do not mix: cross with sparse(x) or dense(x) first
auto combine(const Shards& shared, const Rows& routed) { return shared + routed; }
#else
auto combine(const Shards& shared, const Rows& routed) { return shared + dense(routed); }
#endif

#if defined(FAIL_axis_of_the_other_view)
// expect: not an axis of this view
auto reduce_experts(const Sum& x) { return all_reduce<etp>(x); }
#else
auto reduce_experts(const Sum& x) { return all_reduce<tp>(x); }
#endif

#if defined(FAIL_crossing_with_unequal_letters)
// expect: the views cross where dp and cp carry one letter
auto to_sparse(const Tensor<Dense{T, R, T}>& x) { return sparse(x); }
#else
auto to_sparse(const Shards& x) { return sparse(x); }
#endif

#if defined(FAIL_crossing_home_from_the_experts)
// expect: to_owners<ep>(x), reduce_scatter<etp> a P first
auto to_dense(const ExpertRows& rows, const Splits&, const Splits&) { return dense(rows); }
#else
auto to_dense(const Tensor<Sparse{T, E, P}>& rows, const Splits& send, const Splits& recv) {
  return dense(to_owners<ep>(reduce_scatter<etp>(rows, {.dim = 0}), send, recv));
}
#endif

#if defined(FAIL_different_letters_at_once)
// expect: move one axis at a time
auto gather_all(const Tensor<Dense{T, R, F}>& x) {
  return all_gather<kSequenceAxes>(x, {.dim = 0});
}
#else
auto gather_all(const Tensor<Dense{T, T, T}>& x) {
  return all_gather<kSequenceAxes>(x, {.dim = 0});
}
#endif

// Losses, norms and logs.

#if defined(FAIL_backward_of_replicated_loss)
// expect: keep the sum P, or all_reduce<axis, I>
void train(const Pending& loss) { backward(all_reduce<kTokenAxes>(loss)); }
#else
void train(const Pending& loss) { backward(all_reduce<kTokenAxes, I>(loss)); }
#endif

#if defined(FAIL_backward_of_token_losses)
// expect: sum over tokens first (sum<Over::tokens>)
void train_on_tokens(const Shards& losses) { backward(losses); }
#else
void train_on_tokens(const Shards& losses) { backward(sum<Over::tokens>(losses)); }
#endif

#if defined(FAIL_partial_loss_logged)
// expect: this value is still a partial sum (P): all_reduce<axis> first
double report(const Pending& loss) { return number(loss); }
#else
double report(const Pending& loss) { return number(all_reduce<kTokenAxes>(loss)); }
#endif

#if defined(FAIL_partial_count_as_whole)
// expect: this value is still a partial sum (P): all_reduce<axis> first
double load_of_first(const Shards& map) { return number(select(sum<Over::tokens>(map), 0, 0)); }
#else
double load_of_first(const Shards& map) {
  return number(select(all_reduce<kTokenAxes>(sum<Over::tokens>(map)), 0, 0));
}
#endif

#if defined(FAIL_bias_counts_without_tp)
// expect: this value is still a partial sum (P): all_reduce<axis> first
at::Tensor counts_for_the_bias(const Pending& counts) {
  return whole(all_reduce<cp>(all_reduce<dp>(counts)));
}
#else
at::Tensor counts_for_the_bias(const Pending& counts) {
  return whole(all_reduce<kTokenAxes>(counts));
}
#endif

#if defined(FAIL_bias_counts_without_cp)
// expect: this value is still a partial sum (P): all_reduce<axis> first
at::Tensor counts_of_a_long_sequence(const Pending& counts) {
  return whole(all_reduce<tp>(all_reduce<dp>(counts)));
}
#else
at::Tensor counts_of_a_long_sequence(const Pending& counts) {
  return whole(all_reduce<kTokenAxes>(counts));
}
#endif

#if defined(FAIL_partial_norm_given_to_clip)
// expect: this value is still a partial sum (P): all_reduce<axis> first
at::Tensor clip_partial(const Pending& norm) { return clip_factor(norm, 1.0); }
#else
at::Tensor clip_partial(const Pending& norm) {
  return clip_factor(all_reduce<kTokenAxes>(norm), 1.0);
}
#endif

#if defined(FAIL_shard_given_to_clip)
// expect: this value is one rank's shard: sum it and all_reduce<axis> first
at::Tensor clip_shard(const Tensor<Dense{I, I, F}>& squares) { return clip_factor(squares, 1.0); }
#else
at::Tensor clip_shard(const Tensor<Dense{I, I, F}>& squares) {
  return clip_factor(all_reduce<tp>(sum_all(squares)), 1.0);
}
#endif

// One way in, one way out.

#if defined(FAIL_typed_tensor_as_plain_one)
// expect: local(x) is the way out
at::Tensor out(const Full& x) { return x; }
#else
at::Tensor out(const Full& x) { return local(x); }
#endif

#if defined(FAIL_typed_tensor_given_to_a_plain_function)
// expect: local(x) is the way out
at::Tensor plain(const Full& x) { return at::relu(x); }
#else
at::Tensor plain(const Full& x) { return at::relu(local(x)); }
#endif

#if defined(FAIL_plain_tensor_as_typed_one)
// expect: Dense{Place::T, Place::T, Place::R}
Full in(const at::Tensor& x) { return x; }
#else
Full in(const at::Tensor& x) { return assume<Dense{T, T, R}>(x); }
#endif

}  // namespace moesh
