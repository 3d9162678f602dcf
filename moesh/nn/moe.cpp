#include "moesh/nn/moe.h"

#include <ATen/ATen.h>

#include "moesh/base/error.h"
#include "moesh/spmd/all_gather.h"
#include "moesh/spmd/all_reduce.h"
#include "moesh/spmd/cross.h"
#include "moesh/spmd/enter.h"
#include "moesh/spmd/keep.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/pad.h"
#include "moesh/spmd/reduce_scatter.h"

namespace moesh::nn {
namespace {

using enum Place;
using Partial = Tensor<Dense{T, T, P}>;

// [B, len, D] -> [B * len, D], and back: the layout stays.
template <auto L>
Tensor<L> flatten(const Tensor<L>& x_BLD) {
  return declare<L>(
      [](const at::Tensor& x) { return x.reshape({x.size(0) * x.size(1), x.size(2)}); }, x_BLD);
}
template <auto L>
Tensor<L> unflatten(const Tensor<L>& y_ND, const at::Tensor& like) {
  return declare<L>([&](const at::Tensor& y) { return y.reshape(like.sizes()); }, y_ND);
}

void check_shape(const at::Tensor& x, const Tokens& tokens, bool sequence_parallel) {
  MOESH_CHECK(x.dim() == 3 && x.size(0) == tokens.batch() && x.size(1) == tokens.length(),
              ErrorKind::config, "moe: x is ", x.sizes(), ", and the tokens say [", tokens.batch(),
              ", ", tokens.length(), ", D]");
  MOESH_CHECK(tokens.sequence_parallel() == sequence_parallel, ErrorKind::config,
              "moe: the tokens are cut with sequence_parallel = ", tokens.sequence_parallel(),
              " and x is ", sequence_parallel ? "T" : "I",
              " on tp; make Tokens with the same setting");
}

}  // namespace

void MoeConfig::validate() const {
  MOESH_CHECK(experts.num_experts == router.num_experts, ErrorKind::config, name,
              ": the router has ", router.num_experts, " experts and the experts are ",
              experts.num_experts);
  MOESH_CHECK(shared_ffn >= 0, ErrorKind::config, name, ": shared_ffn is ", shared_ffn,
              "; use 0 (no shared experts) or a width");
  MOESH_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16,
              ErrorKind::config, name, ": dtype ", dtype,
              " is not one of float64, float32, bfloat16");
}

Moe::Moe(const MoeConfig& config)
    : config_((config.validate(), config)),
      dispatcher_(resolve(config.dispatcher, current_mesh().shape(), config.router.top_k)),
      router_(config.router, config.name + "." + config.router_name, config.experts.dim,
              config.dtype, config.device, config.init),
      experts_(config.experts, config.name + ".experts", config.dtype, config.device, config.init) {
  if (config.shared_ffn > 0)
    shared_.emplace(
        config.name + "." + config.shared_name, config.experts.dim, config.shared_ffn,
        ModuleOptions{.dtype = config.dtype, .device = config.device, .init = config.init});
}

// Where ep x etp are the tp ranks themselves, the all_gather dispatcher and the shared experts use
// one gather and one reduction.
bool Moe::gathers_over_tp() const {
  const auto& s = current_mesh().shape();
  return dispatcher_ == Dispatcher::all_gather && s.ep * s.etp == s.tp;
}

Partial Moe::over_tp(const Tensor<Dense{T, T, R}>& x_ND, const Route& route,
                     const Along& rows) const {
  const auto scores = all_gather<tp>(route.weights_NK, rows);
  const at::Tensor chosen = current_mesh().group(tp)->all_gather(route.experts_NK, rows.sizes);
  const Partial y = dense(experts_.share(sparse(x_ND), sparse(scores), chosen));
  return shared_ ? y + (*shared_)(x_ND) : y;
}

Moe::Sharded Moe::operator()(const Tensor<Dense{T, T, T}>& x_BLD, const Tokens& tokens,
                             const RouteOptions& options) {
  check_shape(local(x_BLD), tokens, true);
  const auto x = flatten(x_BLD);
  Route route = router_.choose(x, tokens, options);
  const Along rows{.dim = 0, .sizes = tokens.rows(*current_mesh().group(tp))};
  if (gathers_over_tp()) {
    const auto y = reduce_scatter<tp>(over_tp(all_gather<tp>(x, rows), route, rows), rows);
    return {unflatten(y, local(x_BLD)), std::move(route)};
  }
  Tensor<Dense{T, T, T}> shared;
  auto y = dispatch(dispatcher_, experts_, x, route, tokens, [&] {
    if (shared_) shared = reduce_scatter<tp>((*shared_)(all_gather<tp>(x, rows)), rows);
  });
  if (shared_) y = y + shared;
  return {unflatten(y, local(x_BLD)), std::move(route)};
}

Moe::Invariant Moe::operator()(const Tensor<Dense{T, T, I}>& x_BLD, const Tokens& tokens,
                               const RouteOptions& options) {
  check_shape(local(x_BLD), tokens, false);
  const auto x = flatten(x_BLD);
  const Along rows{.dim = 0, .sizes = tokens.rows(*current_mesh().group(tp))};
  const auto mine = keep<tp>(x, rows);  // I -> T: each rank takes its own tokens
  Route route = router_.choose(mine, tokens, options);
  if (gathers_over_tp()) {
    const auto y = all_reduce<tp, I>(over_tp(enter<tp>(x), route, rows));
    return {unflatten(y, local(x_BLD)), std::move(route)};
  }
  std::optional<Partial> shared;
  const auto routed = dispatch(dispatcher_, experts_, mine, route, tokens, [&] {
    if (shared_) shared = (*shared_)(enter<tp>(x));
  });
  const auto y =
      shared ? all_reduce<tp, I>(*shared + pad<tp>(routed, rows)) : all_gather<tp, I>(routed, rows);
  return {unflatten(y, local(x_BLD)), std::move(route)};
}

}  // namespace moesh::nn
