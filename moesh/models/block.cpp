#include "moesh/models/block.h"

#include <ATen/record_function.h>

#include "moesh/base/this_thread.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/nn/dispatch.h"
#include "moesh/nn/residual.h"

namespace moesh::models {
namespace {

nn::TokenSum auxiliary_losses(const nn::Route& route, const nn::RouterConfig& config,
                              const nn::Tokens& tokens, const MicroBatch& batch,
                              const Auxiliary& asked, const nn::RouteOptions& options) {
  if (!asked.of_routers()) return {};
  const nn::TokenSum none = sum_all(narrow(detach(route.logits_NE), 0, 0, 0));  // of no token
  const auto part = [&](double weight, const auto& term) -> nn::TokenSum {
    return weight == 0 ? none : scale(term(), weight);
  };
  return stack(std::vector<nn::TokenSum>{
      part(asked.balance_weight,
           [&] {
             return nn::balance_loss(route, config, tokens, batch.num_step_tokens,
                                     asked.balance_over, options);
           }),
      part(asked.z_weight, [&] { return nn::z_loss(route, batch.num_step_tokens); }), none});
}

}  // namespace

nn::TokenSum sum_of_defined(const nn::TokenSum& a, const nn::TokenSum& b) {
  if (!local(a).defined()) return b;
  return local(b).defined() ? a + b : a;
}

Block::Block(const DecoderPlan& plan, std::int64_t layer, const ModelOptions& m,
             const nn::ModuleOptions& o)
    : layer_(layer), residual_scale_(plan.residual_scale) {
  interruption_point();
  const auto& c = plan.config;
  const std::string name = "model.layers." + std::to_string(layer);
  attention_norm_ = nn::RmsNorm(name + ".input_layernorm", c.dim, c.norm_eps, o, plan.norm_weight);
  attention_ = plan.attention(layer, name + "." + plan.attention_name(layer), o);
  ffn_norm_ =
      nn::RmsNorm(name + ".post_attention_layernorm", c.dim, c.norm_eps, o, plan.norm_weight);
  if (!plan.is_moe(layer)) {
    mlp_.emplace(name + "." + plan.mlp_name, c.dim, plan.ffn, o);
    return;
  }
  nn::MoeConfig config = plan.moe;
  config.name = name + "." + plan.mlp_name;
  config.router.num_experts = config.experts.num_experts = c.num_experts;
  config.router.top_k = c.top_k;
  config.router.forced_balance = m.forced_balance;
  if (m.score_before_experts)
    config.experts.scores =
        *m.score_before_experts ? kernels::ScoreSide::before : kernels::ScoreSide::after;
  config.experts.dim = c.dim, config.experts.ffn = c.moe_ffn;
  config.dispatcher = m.dispatcher;
  moe_.emplace(config, o);
}

template <bool Sp>
BlockOutput<Sp> Block::run(const nn::Stream<Sp>& x, const nn::Tokens& tokens,
                           const MicroBatch& batch, const ForwardOptions& options,
                           std::int64_t moe_layer) {
  interruption_point();
  const SplitDim over_tp = tokens.over_tp();
  const auto added = [&](const nn::Stream<Sp>& stream, const nn::Stream<Sp>& y) {
    return stream + (residual_scale_ == 1 ? y : scale(y, residual_scale_));
  };
  nn::KvCache* kv_cache =
      options.kv_cache ? &options.kv_cache->layers.at(static_cast<std::size_t>(layer_)) : nullptr;
  nn::MaxLogits* logits = options.watches_logits && options.pass == nn::Pass::training
                              ? &attention_->max_logits()
                              : nullptr;
  const nn::Stream<Sp> after = [&] {
    RECORD_USER_SCOPE("attention");
    const auto [normed, stream] = nn::norm_beside<Sp>(attention_norm_, x);
    const nn::Full full = for_several(nn::to_full<Sp>(normed, over_tp));
    return added(stream, nn::to_stream<Sp>((*attention_)(full, tokens, kv_cache, logits), over_tp));
  }();
  RECORD_USER_SCOPE(mlp_ ? "mlp" : "moe");
  const auto [normed, stream] = nn::norm_beside<Sp>(ffn_norm_, after);
  if (mlp_)
    return {added(stream,
                  nn::to_stream<Sp>(
                      (*mlp_)(nn::to_full<Sp>(normed, over_tp), tokens.span_numbers()), over_tp)),
            {},
            {}};
  const nn::RouteOptions route_options{
      .pass = options.pass, .probe = options.probe, .layer = moe_layer, .micro_batch = batch.index};
  auto dy = coming_gradient<nn::Stream<Sp>::layout>();
  if (dy && residual_scale_ != 1) dy = scale(*dy, residual_scale_);
  const auto out = (*moe_)(normed, tokens, route_options, dy);
  return {added(stream, out.y),
          auxiliary_losses(out.route, moe_->router().config(), tokens, batch, options.auxiliary,
                           route_options),
          out.route.counts_E};
}

template BlockOutput<true> Block::run<true>(const nn::Stream<true>&, const nn::Tokens&,
                                            const MicroBatch&, const ForwardOptions&, std::int64_t);
template BlockOutput<false> Block::run<false>(const nn::Stream<false>&, const nn::Tokens&,
                                              const MicroBatch&, const ForwardOptions&,
                                              std::int64_t);

void Block::each_param(const std::function<void(Stored&)>& f) {
  const auto visit = [&](auto& w) { f(w.stored()); };
  attention_norm_.each_param(visit);
  attention_->each_param(f);
  ffn_norm_.each_param(visit);
  if (mlp_) mlp_->each_param(visit);
  if (moe_) moe_->each_param(visit);
}

std::vector<const Stored*> Block::stored() {
  std::vector<const Stored*> all;
  each_param([&](Stored& w) { all.push_back(&w); });
  return all;
}

bool Block::is_trained() {
  bool any = false;
  each_param([&](Stored& w) { any = any || w.spec.trained; });
  return any;
}

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
    return nn::RmsNorm(name_of(layer) + name, plan.config.dim, plan.config.norm_eps, o);
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
