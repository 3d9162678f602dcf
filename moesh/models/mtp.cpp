#include "moesh/models/mtp.h"

#include "moesh/nn/dispatch.h"
#include "moesh/nn/residual.h"

namespace moesh::models {
namespace {

std::string name_of(std::int64_t layer) { return "model.layers." + std::to_string(layer); }

// Libraries that open an adapter do not have these layers.
nn::ModuleOptions without_lora(nn::ModuleOptions o) {
  o.lora = nn::no_lora;
  return o;
}

}  // namespace

MtpLayer::MtpLayer(const DecoderPlan& plan, std::int64_t layer, const ModelOptions& m,
                   const nn::ModuleOptions& given)
    : block_(plan, layer, m, without_lora(given)) {
  const nn::ModuleOptions o = without_lora(given);
  const auto norm = [&](const char* name) {
    return nn::RmsNorm(name_of(layer) + name, plan.config.dim, plan.config.norm_eps, o.dtype,
                       o.device);
  };
  ahead_norm_ = norm(".enorm"), read_norm_ = norm(".hnorm"), norm_ = norm(".shared_head.norm");
  join_ = nn::uncut(name_of(layer) + ".eh_proj", plan.config.dim, 2 * plan.config.dim, o);
}

template <bool Sp>
nn::Stream<Sp> MtpLayer::join(const nn::Stream<Sp>& ahead_BLD, const nn::Stream<Sp>& read_BLD,
                              const nn::Tokens& tokens) const {
  // In the files the embedding comes first, in the report it comes last.
  const nn::Stream<Sp> both =
      cat(std::vector{nn::norm<Sp>(ahead_norm_, ahead_BLD), nn::norm<Sp>(read_norm_, read_BLD)}, 2);
  // No token is multiplied twice: without sequence parallelism tp ranks take turns.
  const SplitDim rows = nn::rows_over_tp(tokens);
  const nn::PerToken y = join_(nn::own_tokens<Sp>(flatten(both, 0, 1), rows));
  const auto to_stream = [&]() -> nn::Stream<Sp> {
    if constexpr (Sp)
      return y;
    else
      return all_gather<tp, Place::I>(y, rows);
  };
  return unflatten(to_stream(), 0, {tokens.batch(), tokens.length()});
}

template nn::Stream<true> MtpLayer::join<true>(const nn::Stream<true>&, const nn::Stream<true>&,
                                               const nn::Tokens&) const;
template nn::Stream<false> MtpLayer::join<false>(const nn::Stream<false>&, const nn::Stream<false>&,
                                                 const nn::Tokens&) const;

void MtpLayer::each_param(const std::function<void(Stored&)>& f) {
  const auto visit = [&](auto& w) { f(w.stored()); };
  ahead_norm_.each_param(visit), read_norm_.each_param(visit), join_.each_param(visit);
  block_.each_param(f);
  norm_.each_param(visit);
}

}  // namespace moesh::models
