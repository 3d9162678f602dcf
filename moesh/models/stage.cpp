// B batch, L tokens of this cp rank, D model, V vocabulary of this tp rank

#include "moesh/models/stage.h"

#include <ATen/record_function.h>

#include <utility>

#include "moesh/base/error.h"
#include "moesh/nn/residual.h"
#include "moesh/spmd/kept_gathers.h"
#include "moesh/spmd/recompute.h"
#include "moesh/spmd/reduce.h"
#include "moesh/spmd/reshard.h"
#include "moesh/spmd/weights_later.h"

namespace moesh::models {
namespace {

std::int64_t numel(const Stored& w) {
  std::int64_t product = 1;
  for (auto n : w.spec.shape) product *= n;
  return product;
}

}  // namespace

Stage::Stage(const DecoderPlan& plan, const ModelOptions& m, LayerRange range, const Stage* first)
    : config_(plan.config), is_first_(range.begin == 0) {
  const auto& c = config_;
  MOESH_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= c.num_layers,
              ErrorKind::config, "a stage of the blocks [", range.begin, ", ", range.end,
              ") of a decoder with ", c.num_layers);
  const nn::ModuleOptions o{
      .dtype = m.dtype,
      .device = m.device,
      .init = {.kind = Init::Kind::normal, .scale = c.init_std, .seed = m.seed},
      .bias_init = Init{.kind = c.bias_std > 0 ? Init::Kind::normal : Init::Kind::zeros,
                        .scale = c.bias_std,
                        .seed = m.seed}};
  const bool is_last = range.end == c.num_layers, is_tied_head = is_last && c.tie_embeddings;
  if (is_tied_head && !is_first_ && first) embedding_ = first->embedding_;
  if (!embedding_ && (is_first_ || is_tied_head)) {
    has_own_embedding_ = true;
    embedding_ = std::make_shared<nn::Embedding>("model.embed_tokens", c.vocab, c.dim, o.dtype,
                                                 o.device, o.init);
    embedding_->weight().stored().is_of_other_stage = !is_first_;
  }
  for (std::int64_t i = 0; i < range.begin; ++i) first_moe_layer_ += plan.is_moe(i);
  for (std::int64_t i = range.begin; i < range.end; ++i)
    blocks_.push_back(std::make_unique<Block>(plan, i, m, o));
  if (is_last) {
    norm_.emplace("model.norm", c.dim, c.norm_eps, o.dtype, o.device);
    if (!c.tie_embeddings) head_ = nn::column("lm_head", c.vocab, c.dim, o);
  }
  each_param([&](Stored& w) {
    const bool is_expert = w.storage == efsdp;
    num_parameters_ += numel(w);
    num_active_ += is_expert ? numel(w) / c.num_experts * c.top_k : numel(w);
  });
}

nn::Tokens Stage::tokens_of(const MicroBatch& batch, const ForwardOptions& options) const {
  const auto& ids = batch.input_ids_BL;
  const std::int64_t before = options.past ? options.past->num_tokens : 0;
  MOESH_CHECK(ids.dim() == 2 && before + ids.size(1) <= config_.max_sequence, ErrorKind::config,
              "input_ids are ", ids.sizes(), ", after ", before,
              " tokens; the model takes sequences of up to ", config_.max_sequence, " tokens");
  return {current_mesh(),   ids.size(0),     ids.size(1), options.sequence_parallel,
          batch.valid_BL(), batch.documents, before};
}

template <bool Sp>
nn::Stream<Sp> Stage::embed(const MicroBatch& batch, const nn::Tokens& tokens,
                            const ForwardOptions& options) const {
  RECORD_USER_SCOPE("embedding");
  MOESH_CHECK(is_first_, "embed of a stage that does not begin with the first block");
  const auto x =
      nn::to_stream<Sp>((*embedding_)(tokens.my_span(batch.input_ids_BL)), tokens.over_tp());
  if (options.probe) options.probe->on_input(local(x));
  return x;
}

template <bool Sp>
BlockOutput<Sp> Stage::run_block(BlockRun& run, const nn::Stream<Sp>& input,
                                 const MicroBatch& batch, const nn::Tokens& tokens,
                                 const ForwardOptions& options, std::int64_t moe_layer) {
  Block& block = *run.block;
  const nn::Stream<Sp> x = begin_bucket(input);
  if (options.recompute != Recompute::none && options.pass == nn::Pass::training)
    return recompute(
        [&block, before = run.before, tokens, batch, options, moe_layer](
            const nn::Stream<Sp>& stream, bool again) {
          ForwardOptions o = options;
          if (again) o.pass = nn::Pass::recompute;
          std::optional<TakeKept> kept;
          if (!options.reshard) kept.emplace();
          // Backward comes to the block before this one next.
          if (again && options.reshard) {
            prefetch(block.stored());
            if (before) prefetch(before->stored());
          }
          return block.run<Sp>(stream, tokens, batch, o, moe_layer);
        },
        x, options.recompute == Recompute::selective ? Keep::expensive : Keep::nothing);
  if (!options.reshard) {
    const TakeKept kept;
    return block.run<Sp>(x, tokens, batch, options, moe_layer);
  }
  ReshardScope scope(run.gathers_before);
  run.gathers_before = scope.gathers();
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
  for (size_t i = 0; i < blocks_.size(); ++i) {
    // The parameters of the next block travel while this one computes.
    for (size_t next : {i, i + 1})
      if (options.reshard && next < blocks_.size()) prefetch(blocks_[next]->stored());
    run.before = std::exchange(run.block, blocks_[i].get());
    const auto [x, auxiliary, counts_E] =
        run_block<Sp>(run, out.x_BLD, batch, tokens, options, moe_layer);
    out.x_BLD = x;
    if (local(auxiliary).defined())
      out.auxiliary = local(out.auxiliary).defined() ? out.auxiliary + auxiliary : auxiliary;
    if (!blocks_[i]->is_moe()) continue;
    out.counts_E.push_back(counts_E);
    ++moe_layer;
  }
  return out;
}

template <bool Sp>
nn::TokenSum Stage::head(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch,
                         const nn::Tokens& tokens, const ForwardOptions& options) const {
  RECORD_USER_SCOPE("head");
  MOESH_CHECK(norm_, "head of a stage that does not end with the last block");
  const nn::Full x = nn::to_full<Sp>(nn::norm<Sp>(*norm_, begin_bucket(x_BLD)), tokens.over_tp());
  // The gradient is there with the loss: to keep it for later would cost as much memory again.
  std::optional<WeightsNow> now(std::in_place);
  const auto weight = use(head_ ? *head_ : embedding_->weight());
  now.reset();
  if (options.probe) options.probe->on_logits(local(linear(x, weight)).detach());
  const at::Tensor labels = tokens.my_span(batch.labels_BL).flatten();
  const auto sum = nn::cross_entropy(flatten(x, 0, 1), weight, labels, config_.vocab);
  return once<tp>(scale(sum, batch.num_step_tokens.reciprocal()));
}

template <bool Sp>
Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits(const nn::Stream<Sp>& x_BLD,
                                                               const nn::Tokens& tokens) const {
  MOESH_CHECK(norm_, "last_logits of a stage that does not end with the last block");
  const nn::Full x = nn::to_full<Sp>(nn::norm<Sp>(*norm_, x_BLD), tokens.over_tp());
  const auto last = select(all_gather<cp>(x, tokens.over_cp()), 1, tokens.sequence() - 1);
  const auto logits = linear(last, use(head_ ? *head_ : embedding_->weight()));
  const Pieces words{config_.vocab, current_mesh().size(tp)};
  return all_gather<tp>(logits, {.dim = 1, .sizes = words.lengths()});
}

void Stage::each_param(const std::function<void(Stored&)>& f) {
  if (has_own_embedding_) f(embedding_->weight().stored());
  for (auto& b : blocks_) b->each_param(f);
  if (norm_) norm_->each_param([&](auto& w) { f(w.stored()); });
  if (head_) f(head_->stored());
}

std::vector<nn::Router*> Stage::routers() {
  std::vector<nn::Router*> all;
  for (auto& b : blocks_)
    if (b->is_moe()) all.push_back(&b->router());
  return all;
}

double Stage::flops_per_token(std::int64_t sequence) const {
  // An embedding that is not the head as well is looked up: no FLOP.
  const std::int64_t looked_up =
      has_own_embedding_ && (head_ || !norm_) ? config_.vocab * config_.dim : 0;
  double sum = 6.0 * static_cast<double>(num_active_ - looked_up);
  for (const auto& b : blocks_) sum += b->attention().flops(sequence);
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
template nn::TokenSum Stage::head<true>(const nn::Stream<true>&, const MicroBatch&,
                                        const nn::Tokens&, const ForwardOptions&) const;
template nn::TokenSum Stage::head<false>(const nn::Stream<false>&, const MicroBatch&,
                                         const nn::Tokens&, const ForwardOptions&) const;
template Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits<true>(
    const nn::Stream<true>&, const nn::Tokens&) const;
template Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits<false>(
    const nn::Stream<false>&, const nn::Tokens&) const;

}  // namespace moesh::models
