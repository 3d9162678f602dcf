// B batch, L tokens of this cp rank, D model, V vocabulary of this tp rank

#include "moesh/models/stage.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "moesh/base/error.h"
#include "moesh/base/this_thread.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/fsdp/reduce.h"
#include "moesh/fsdp/reshard.h"
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

void MtpLayer::each_param(const std::function<void(Stored&)>& f) {
  const auto visit = [&](auto& w) { f(w.stored()); };
  ahead_norm_.each_param(visit), read_norm_.each_param(visit), join_.each_param(visit);
  block_.each_param(f);
  norm_.each_param(visit);
}

namespace {

// [B, L, 1]: at each position the token n positions later; a value that is not a word past the end.
at::Tensor moved_back(const at::Tensor& x_BL1, std::size_t n) {
  const auto by = std::min(static_cast<std::int64_t>(n), x_BL1.size(1));
  return at::constant_pad_nd(x_BL1.narrow(1, by, x_BL1.size(1) - by), {0, 0, 0, by}, kIgnoredLabel);
}

}  // namespace

Stage::Stage(const DecoderPlan& plan, const ModelOptions& m, LayerRange range, const Stage* first)
    : config_(plan.config),
      embedding_scale_(plan.embedding_scale),
      logits_scale_(plan.logits_scale),
      is_first_(range.begin == 0) {
  const auto& c = config_;
  MOESH_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= c.num_layers,
              ErrorKind::config, "a stage of the blocks [", range.begin, ", ", range.end,
              ") of a decoder with ", c.num_layers);
  const nn::ModuleOptions o{
      .dtype = m.dtype,
      .device = m.device,
      .init = {.kind = Init::Distribution::normal, .scale = c.init_std, .seed = m.seed},
      .bias_init =
          Init{.kind = c.bias_std > 0 ? Init::Distribution::normal : Init::Distribution::zeros,
               .scale = c.bias_std,
               .seed = m.seed},
      .lora = m.lora,
      .float8 = m.float8};
  // Block by block: what is frozen takes less memory, and its master weights are gone by then.
  const auto freeze = [&](Stored& w) {
    if (!m.is_frozen || !m.is_frozen(w.spec.name)) return;
    const auto how = m.quantization ? m.quantization(w.spec.name) : std::nullopt;
    how ? raw::quantize(w, *how, c.init_std) : raw::freeze(w);
  };
  const bool is_last = range.end == c.num_layers,
             ends_with_embedding = is_last && (c.tie_embeddings || plan.num_mtp_layers > 0);
  if (ends_with_embedding && !is_first_ && first) embedding_ = first->embedding_;
  if (!embedding_ && (is_first_ || ends_with_embedding)) {
    has_own_embedding_ = true;
    embedding_ = std::make_shared<nn::Embedding>("model.embed_tokens", c.vocab, c.dim, o);
    embedding_->weight().stored().is_of_other_stage = !is_first_;
    freeze(embedding_->weight().stored());
  }
  for (std::int64_t i = 0; i < range.begin; ++i) first_moe_layer_ += plan.is_moe(i);
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    blocks_.push_back(std::make_unique<Block>(plan, i, m, o));
    blocks_.back()->each_param(freeze);
  }
  if (is_last) {
    norm_.emplace("model.norm", c.dim, c.norm_eps, o, plan.norm_weight);
    norm_->each_param([&](auto& w) { freeze(w.stored()); });
    if (!c.tie_embeddings) {
      head_ = nn::Cut(o.spec("lm_head.weight", {c.vocab, c.dim}, {{tp, 0}}), o.init);
      head_->stored().spec.is_matrix = false;
      freeze(head_->stored());
    }
    for (std::int64_t k = 0; k < plan.num_mtp_layers; ++k) {
      mtp_.push_back(std::make_unique<MtpLayer>(plan, c.num_layers + k, m, o));
      mtp_.back()->each_param(freeze);
    }
  }
  each_param([&](Stored& w) {
    const bool is_expert = w.storage == efsdp;
    const std::int64_t numel = c10::multiply_integers(w.spec.shape);
    num_parameters_ += numel;
    const std::int64_t num_active = is_expert ? numel / c.num_experts * c.top_k : numel;
    num_active_ += num_active;
    if (!w.spec.trained) num_frozen_active_ += num_active;
  });
}

nn::Tokens Stage::tokens_of(const MicroBatch& batch, const ForwardOptions& options) const {
  const auto& ids = batch.input_ids_BL;
  const std::int64_t before = options.kv_cache ? options.kv_cache->num_tokens : 0;
  MOESH_CHECK(ids.dim() == 2 && before + ids.size(1) <= config_.max_sequence, ErrorKind::config,
              "input_ids are ", ids.sizes(), ", after ", before,
              " tokens; the model takes sequences of up to ", config_.max_sequence, " tokens");
  // An evaluation drops nothing.
  const bool is_training = options.pass != nn::Pass::evaluation;
  return {current_mesh(),
          ids.size(0),
          ids.size(1),
          options.sequence_parallel,
          options.sequence_cut,
          batch.valid_BL(),
          batch.documents,
          before,
          is_training ? batch.samples_B : at::Tensor()};
}

template <bool Sp>
nn::Stream<Sp> Stage::embedded(const at::Tensor& ids_BL, const nn::Tokens& tokens) const {
  const auto x = nn::to_stream<Sp>((*embedding_)(tokens.my_span(ids_BL)), tokens.over_tp());
  return embedding_scale_ == 1 ? x : scale(x, embedding_scale_);
}

template <bool Sp>
nn::Stream<Sp> Stage::embed(const MicroBatch& batch, const nn::Tokens& tokens,
                            const ForwardOptions& options) const {
  RECORD_USER_SCOPE("embedding");
  MOESH_CHECK(is_first_, "embed of a stage that does not begin with the first block");
  const auto x = embedded<Sp>(batch.input_ids_BL, tokens);
  if (options.probe) options.probe->on_input(local(x));
  return x;
}

template <bool Sp>
BlockOutput<Sp> Stage::run_block(BlockRun& run, const nn::Stream<Sp>& input,
                                 const MicroBatch& batch, const nn::Tokens& tokens,
                                 const ForwardOptions& options, std::int64_t moe_layer) {
  Block& block = *run.block;
  const nn::Stream<Sp> x = begin_bucket(input);
  // Backward ends where nothing before is trained.
  const bool has_backward = local(x).requires_grad() || block.is_trained();
  if (!has_backward) run.block = nullptr;
  if (options.recompute != Recompute::none && options.pass == nn::Pass::training && has_backward)
    return recompute(
        [&block, before = run.before, tokens, batch, options, moe_layer](
            const nn::Stream<Sp>& stream, bool again) {
          ForwardOptions o = options;
          if (again) o.pass = nn::Pass::recompute;
          // Backward comes to the block before this one next.
          if (again && options.reshard) {
            prefetch(block.stored());
            if (before) prefetch(before->stored());
          }
          return block.run<Sp>(stream, tokens, batch, o, moe_layer);
        },
        x, options.recompute == Recompute::selective ? Keep::expensive : Keep::nothing);
  if (!options.reshard) return block.run<Sp>(x, tokens, batch, options, moe_layer);
  ReshardScope scope(run.gathers_before);
  run.gathers_before = has_backward ? scope.gathers() : nullptr;
  auto out = block.run<Sp>(scope.enter(x), tokens, batch, options, moe_layer);
  std::get<0>(out) = scope.leave(std::get<0>(out));
  return out;
}

template <bool Sp>
StageOutput<Sp> Stage::run_blocks(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch,
                                  const nn::Tokens& tokens, const ForwardOptions& options) {
  StageOutput<Sp> out{.x_BLD = x_BLD};
  std::int64_t moe_layer = first_moe_layer_;
  BlockRun run;
  if (!options.reshard)
    for (const auto& block : blocks_) keep_gathered(block->stored());
  for (size_t i = 0; i < blocks_.size(); ++i) {
    // The parameters of the next block travel while this one computes.
    for (size_t next : {i, i + 1})
      if (options.reshard && next < blocks_.size()) prefetch(blocks_[next]->stored());
    if (options.reshard) cast_ahead(blocks_[i]->stored());
    run.before = std::exchange(run.block, blocks_[i].get());
    const auto [x, auxiliary, counts_E] =
        run_block<Sp>(run, out.x_BLD, batch, tokens, options, moe_layer);
    out.x_BLD = x;
    out.auxiliary = sum_of_defined(out.auxiliary, auxiliary);
    if (!blocks_[i]->is_moe()) continue;
    out.counts_E.push_back(counts_E);
    ++moe_layer;
  }
  return out;
}

template <bool Sp>
nn::Full Stage::to_head(const nn::Stream<Sp>& normed_BLD, const nn::Tokens& tokens) const {
  const nn::Full x = nn::to_full<Sp>(normed_BLD, tokens.over_tp());
  return logits_scale_ == 1 ? x : scale(x, logits_scale_);  // here, where it is small
}

Stage::HeadWeight Stage::head_weight(raw::LateGradient late) const {
  return use(head_ ? *head_ : embedding_->weight(), late);
}

bool Stage::is_head_trained() const {
  return (head_ ? head_->stored() : embedding_->weight().stored()).spec.trained;
}

nn::TokenSum Stage::loss_of(const nn::Full& x_BLD, const HeadWeight& weight,
                            const at::Tensor& labels_BL, const MicroBatch& batch,
                            const nn::Tokens& tokens) const {
  const at::Tensor labels = tokens.my_span(labels_BL).flatten();
  const auto sum = nn::cross_entropy(flatten(x_BLD, 0, 1), weight, labels, config_.vocab);
  return once<tp>(scale(sum, batch.num_step_tokens.reciprocal()));
}

nn::OfSpan Stage::choices(const nn::Full& x_BLD, const HeadWeight& weight) const {
  return unflatten(nn::best_words(flatten(x_BLD, 0, 1), weight, config_.vocab), 0,
                   {local(x_BLD).size(0), local(x_BLD).size(1), 1});
}

template <bool Sp>
ForwardResult Stage::head(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch,
                          const nn::Tokens& tokens, const ForwardOptions& options) {
  RECORD_USER_SCOPE("head");
  MOESH_CHECK(norm_, "head of a stage that does not end with the last block");
  const nn::Stream<Sp> read = nn::norm<Sp>(*norm_, begin_bucket(x_BLD));
  const nn::Full x = to_head<Sp>(read, tokens);
  // The gradient is there with the loss: to keep it for later would cost as much memory again.
  const HeadWeight weight = head_weight(raw::LateGradient::never);
  if (options.probe && options.probe->wants_logits())
    options.probe->on_logits(local(linear(x, weight)).detach());
  ForwardResult out;
  out.cross_entropy = loss_of(x, weight, batch.labels_BL, batch, tokens);
  if (!mtp_.empty()) predict_further<Sp>(read, weight, batch, tokens, options, out);
  return out;
}

template <bool Sp>
void Stage::predict_further(nn::Stream<Sp> read_BLD, const HeadWeight& weight,
                            const MicroBatch& batch, const nn::Tokens& tokens,
                            const ForwardOptions& options, ForwardResult& out) {
  RECORD_USER_SCOPE("multi-token prediction");
  MOESH_CHECK(batch.ahead.size() == mtp_.size(), ErrorKind::config,
              "a micro-batch with tokens for ", batch.ahead.size(),
              " depths of multi-token prediction, and the model has ", mtp_.size());
  const bool is_evaluation = options.pass == nn::Pass::evaluation;
  Tensor<Dense{Place::T, Place::R, Place::R}> chosen_BL1;  // by the model itself
  if (is_evaluation)
    chosen_BL1 = whole_sequence(choices(to_head<Sp>(read_BLD, tokens), weight), tokens);
  std::int64_t moe_layer = first_moe_layer_;
  for (const auto& block : blocks_) moe_layer += block->is_moe();
  const auto depths = static_cast<double>(mtp_.size());
  BlockRun run;
  for (std::size_t k = 0; k < mtp_.size(); ++k) {
    MtpLayer& layer = *mtp_[k];
    const MicroBatch::MtpInput& ahead = batch.ahead[k];
    if (options.reshard)
      prefetch(layer.block().stored());
    else
      keep_gathered(layer.block().stored());
    const nn::Tokens counted(current_mesh(), tokens.batch(), tokens.sequence(), Sp,
                             options.sequence_cut, ahead.valid_BL(), batch.documents);
    const nn::Stream<Sp> x =
        layer.join<Sp>(embedded<Sp>(ahead.input_ids_BL, tokens), read_BLD, tokens);
    run.before = std::exchange(run.block, &layer.block());
    const auto [y, auxiliary, counts_E] = run_block<Sp>(run, x, batch, counted, options, moe_layer);
    read_BLD = nn::norm<Sp>(layer.norm(), y);
    const nn::Full to_words = to_head<Sp>(read_BLD, tokens);
    const nn::TokenSum loss = loss_of(to_words, weight, ahead.labels_BL, batch, tokens);
    out.auxiliary = sum_of_defined(out.auxiliary, auxiliary);
    if (layer.block().is_moe()) out.counts_E.push_back(counts_E), ++moe_layer;
    if (!is_evaluation) {
      const nn::TokenSum none = sum_all(narrow(stack(std::vector{detach(loss)}), 0, 0, 0));
      out.auxiliary = sum_of_defined(
          out.auxiliary, stack(std::vector<nn::TokenSum>{
                             none, none, scale(loss, options.auxiliary.mtp_weight / depths)}));
      continue;
    }
    // The model comes to this token k + 1 positions later.
    const auto later = own_span(
        map_rows([n = k + 1](const at::Tensor& t) { return moved_back(t, n); }, chosen_BL1),
        tokens);
    const at::Tensor valid = tokens.my_span(ahead.valid_BL()).unsqueeze(2);
    const auto is_accepted = map_rows(
        [&](const at::Tensor& mine, const at::Tensor& theirs) {
          return mine.eq(theirs).logical_and(valid).to(at::kLong);
        },
        choices(to_words, weight), later);
    out.predicted.push_back({loss, once<tp>(sum_all(is_accepted))});
  }
}

template <bool Sp>
Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits(const nn::Stream<Sp>& x_BLD,
                                                               const nn::Tokens& tokens) const {
  MOESH_CHECK(norm_, "last_logits of a stage that does not end with the last block");
  const nn::Full x = to_head<Sp>(nn::norm<Sp>(*norm_, x_BLD), tokens);
  const auto last = select(whole_sequence(x, tokens), 1, tokens.sequence() - 1);
  const auto logits = linear(last, head_weight(raw::LateGradient::may_be));
  const Pieces words{config_.vocab, current_mesh().size(tp)};
  return all_gather<tp>(logits, {.dim = 1, .sizes = words.lengths()});
}

void Stage::each_param(const std::function<void(Stored&)>& f) {
  if (has_own_embedding_) f(embedding_->weight().stored());
  for (auto& b : blocks_) b->each_param(f);
  if (norm_) norm_->each_param([&](auto& w) { f(w.stored()); });
  if (head_) f(head_->stored());
  for (auto& layer : mtp_) layer->each_param(f);
}

std::vector<nn::Attention*> Stage::attentions() {
  std::vector<nn::Attention*> all;
  for (const auto& b : blocks_) all.push_back(&b->attention());
  for (const auto& layer : mtp_) all.push_back(&layer->block().attention());
  return all;
}

std::vector<nn::Router*> Stage::routers() {
  std::vector<nn::Router*> all;
  for (auto& b : blocks_)
    if (b->is_moe()) all.push_back(&b->router());
  for (auto& layer : mtp_)
    if (layer->block().is_moe()) all.push_back(&layer->block().router());
  return all;
}

double Stage::flops_per_token(std::int64_t sequence) const {
  // An embedding that is not the head as well is looked up: no FLOP.
  const bool is_looked_up = has_own_embedding_ && (head_ || !norm_);
  const std::int64_t looked_up = is_looked_up ? config_.vocab * config_.dim : 0;
  const bool is_lookup_frozen = is_looked_up && !embedding_->weight().stored().spec.trained;
  const std::int64_t frozen = num_frozen_active_ - (is_lookup_frozen ? looked_up : 0);
  // Two FLOPs for each weight in forward, two for the gradient of its input, and two for its own.
  double sum =
      6.0 * static_cast<double>(num_active_ - looked_up) - 2.0 * static_cast<double>(frozen);
  for (const auto& b : blocks_) sum += b->attention().flops(sequence);
  // The head is used once more by each.
  const auto head = static_cast<double>(config_.vocab * config_.dim);
  for (const auto& layer : mtp_)
    sum += layer->block().attention().flops(sequence) + (is_head_trained() ? 6 : 4) * head;
  return sum;
}

template nn::Stream<true> Stage::embed<true>(const MicroBatch&, const nn::Tokens&,
                                             const ForwardOptions&) const;
template nn::Stream<false> Stage::embed<false>(const MicroBatch&, const nn::Tokens&,
                                               const ForwardOptions&) const;
template StageOutput<true> Stage::run_blocks<true>(const nn::Stream<true>&, const MicroBatch&,
                                                   const nn::Tokens&, const ForwardOptions&);
template StageOutput<false> Stage::run_blocks<false>(const nn::Stream<false>&, const MicroBatch&,
                                                     const nn::Tokens&, const ForwardOptions&);
template ForwardResult Stage::head<true>(const nn::Stream<true>&, const MicroBatch&,
                                         const nn::Tokens&, const ForwardOptions&);
template ForwardResult Stage::head<false>(const nn::Stream<false>&, const MicroBatch&,
                                          const nn::Tokens&, const ForwardOptions&);
template Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits<true>(
    const nn::Stream<true>&, const nn::Tokens&) const;
template Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits<false>(
    const nn::Stream<false>&, const nn::Tokens&) const;

}  // namespace moesh::models
