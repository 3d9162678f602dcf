#include "moesh/nn/moe.h"

#include "moesh/base/error.h"
#include "moesh/nn/dispatch.h"
#include "moesh/spmd/ops.h"
#include "moesh/spmd/transitions.h"

namespace moesh::nn {
namespace {

void check_shape(const at::Tensor& x, const Tokens& tokens, bool sequence_parallel) {
  MOESH_CHECK(x.dim() == 3 && x.size(0) == tokens.batch() && x.size(1) == tokens.length(),
              ErrorKind::config, "moe: x is ", x.sizes(), ", and the tokens say [", tokens.batch(),
              ", ", tokens.length(), ", D]");
  MOESH_CHECK(tokens.sequence_parallel() == sequence_parallel, ErrorKind::config,
              "moe: the tokens are cut with sequence_parallel = ", tokens.sequence_parallel(),
              " and x is ", sequence_parallel ? "T" : "I",
              " on tp; make Tokens with the same setting");
}

// As training.float8_rows has it.
class Float8Codec final : public RowCodec {
 public:
  explicit Float8Codec(std::int64_t tile) : tile_(tile) {}
  at::Tensor encode(const at::Tensor& rows_RD) const override {
    return kernels::pack_float8(rows_RD, tile_);
  }
  at::Tensor decode(const at::Tensor& words, const at::Tensor& like) const override {
    return kernels::unpack_float8(words, like.size(1), tile_, like.scalar_type());
  }

 private:
  std::int64_t tile_;
};

}  // namespace

void MoeConfig::validate() const {
  MOESH_CHECK(experts.num_experts == router.num_experts, ErrorKind::config, name,
              ": the router has ", router.num_experts, " experts and the experts are ",
              experts.num_experts);
  MOESH_CHECK(shared_ffn >= 0, ErrorKind::config, name, ": shared_ffn is ", shared_ffn,
              "; use 0 (no shared experts) or a width");
}

Moe::Moe(const MoeConfig& config, const ModuleOptions& o)
    : dispatch_((config.validate(), make_dispatch(resolve(config.dispatcher, current_mesh().shape(),
                                                          config.router, transport_of(o.device)),
                                                  current_mesh().shape(), config.router))),
      codec_(o.float8.rows > 0 ? std::make_shared<Float8Codec>(o.float8.rows) : nullptr),
      router_(config.router, config.name + "." + config.router_name, config.experts.dim, o),
      experts_(config.experts, config.name + ".experts", o) {
  if (config.shared_ffn > 0)
    shared_.emplace(config.name + "." + config.shared_name,
                    config.shared_gate.empty() ? "" : config.name + "." + config.shared_gate,
                    config.experts.dim, config.shared_ffn, o);
}

template <auto L>
Moe::Output<L.tp == Place::T> Moe::operator()(const Tensor<L>& x_BLD, const Tokens& tokens,
                                              const RouteOptions& options,
                                              const std::optional<Tensor<L>>& dy_BLD) {
  constexpr bool Sp = L.tp == Place::T;
  check_shape(local(x_BLD), tokens, Sp);
  const Stream<Sp> x_ND = for_several(flatten(x_BLD, 0, 1));
  const PerToken mine = own_tokens<Sp>(x_ND, rows_over_tp(tokens));
  Route route = router_.choose(mine, tokens, options);
  std::optional<PerToken> dy;
  if (dy_BLD) dy = own_tokens<Sp>(flatten(*dy_BLD, 0, 1), rows_over_tp(tokens));
  const Stream<Sp> y = (*dispatch_)({.experts = experts_,
                                     .shared = shared_ ? &*shared_ : nullptr,
                                     .x_ND = mine,
                                     .route = route,
                                     .tokens = tokens,
                                     .dy_ND = dy,
                                     .codec = codec_},
                                    x_ND);
  return {unflatten(y, 0, {tokens.batch(), tokens.length()}), std::move(route)};
}

template Moe::Output<true> Moe::operator()(const Stream<true>&, const Tokens&, const RouteOptions&,
                                           const std::optional<Stream<true>>&);
template Moe::Output<false> Moe::operator()(const Stream<false>&, const Tokens&,
                                            const RouteOptions&,
                                            const std::optional<Stream<false>>&);

}  // namespace moesh::nn
