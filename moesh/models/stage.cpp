// B batch, L tokens of this cp rank, D model, V vocabulary of this tp rank

#include "moesh/models/stage.h"

#include <ATen/record_function.h>

#include <utility>

#include "moesh/base/error.h"
#include "moesh/fsdp/recompute.h"
#include "moesh/fsdp/reduce.h"
#include "moesh/fsdp/reshard.h"
#include "moesh/nn/residual.h"

namespace moesh::models {
namespace {

std::int64_t numel(const Stored& w) {
  std::int64_t product = 1;
  for (auto n : w.spec.shape) product *= n;
  return product;
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
      .init = {.kind = Init::Kind::normal, .scale = c.init_std, .seed = m.seed},
      .bias_init = Init{.kind = c.bias_std > 0 ? Init::Kind::normal : Init::Kind::zeros,
                        .scale = c.bias_std,
                        .seed = m.seed},
      .lora = m.lora};
  // Block by block: what is frozen takes less memory, and its master weights are gone by then.
  const auto freeze = [&](Stored& w) {
    if (m.is_frozen && m.is_frozen(w.spec.name)) raw::freeze(w);
  };
  const bool is_last = range.end == c.num_layers, is_tied_head = is_last && c.tie_embeddings;
  if (is_tied_head && !is_first_ && first) embedding_ = first->embedding_;
  if (!embedding_ && (is_first_ || is_tied_head)) {
    has_own_embedding_ = true;
    embedding_ = std::make_shared<nn::Embedding>("model.embed_tokens", c.vocab, c.dim, o.dtype,
                                                 o.device, o.init);
    embedding_->weight().stored().is_of_other_stage = !is_first_;
    freeze(embedding_->weight().stored());
  }
  for (std::int64_t i = 0; i < range.begin; ++i) first_moe_layer_ += plan.is_moe(i);
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    blocks_.push_back(std::make_unique<Block>(plan, i, m, o));
    blocks_.back()->each_param(freeze);
  }
  if (is_last) {
    norm_.emplace("model.norm", c.dim, c.norm_eps, o.dtype, o.device);
    norm_->each_param([&](auto& w) { freeze(w.stored()); });
    if (!c.tie_embeddings) {
      head_ = nn::Cut(o.spec("lm_head.weight", {c.vocab, c.dim}, {{tp, 0}}), o.init);
      head_->stored().spec.is_matrix = false;
      freeze(head_->stored());
    }
  }
  each_param([&](Stored& w) {
    const bool is_expert = w.storage == efsdp;
    num_parameters_ += numel(w);
    const std::int64_t num_active = is_expert ? numel(w) / c.num_experts * c.top_k : numel(w);
    num_active_ += num_active;
    if (!w.spec.trained) num_frozen_active_ += num_active;
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
  auto x = nn::to_stream<Sp>((*embedding_)(tokens.my_span(batch.input_ids_BL)), tokens.over_tp());
  if (embedding_scale_ != 1) x = scale(x, embedding_scale_);
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
nn::Full Stage::to_head(const nn::Stream<Sp>& x_BLD, const nn::Tokens& tokens) const {
  const nn::Full x = nn::to_full<Sp>(nn::norm<Sp>(*norm_, x_BLD), tokens.over_tp());
  return logits_scale_ == 1 ? x : scale(x, logits_scale_);  // here, where it is small
}

template <bool Sp>
nn::TokenSum Stage::head(const nn::Stream<Sp>& x_BLD, const MicroBatch& batch,
                         const nn::Tokens& tokens, const ForwardOptions& options) const {
  RECORD_USER_SCOPE("head");
  MOESH_CHECK(norm_, "head of a stage that does not end with the last block");
  const nn::Full x = to_head<Sp>(begin_bucket(x_BLD), tokens);
  // The gradient is there with the loss: to keep it for later would cost as much memory again.
  const auto weight = use(head_ ? *head_ : embedding_->weight(), raw::Late::never);
  if (options.probe) options.probe->on_logits(local(linear(x, weight)).detach());
  const at::Tensor labels = tokens.my_span(batch.labels_BL).flatten();
  const auto sum = nn::cross_entropy(flatten(x, 0, 1), weight, labels, config_.vocab);
  return once<tp>(scale(sum, batch.num_step_tokens.reciprocal()));
}

template <bool Sp>
Tensor<Dense{Place::T, Place::R, Place::R}> Stage::last_logits(const nn::Stream<Sp>& x_BLD,
                                                               const nn::Tokens& tokens) const {
  MOESH_CHECK(norm_, "last_logits of a stage that does not end with the last block");
  const nn::Full x = to_head<Sp>(x_BLD, tokens);
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

std::vector<nn::Attention*> Stage::attentions() {
  std::vector<nn::Attention*> all;
  for (const auto& b : blocks_) all.push_back(&b->attention());
  return all;
}

std::vector<nn::Router*> Stage::routers() {
  std::vector<nn::Router*> all;
  for (auto& b : blocks_)
    if (b->is_moe()) all.push_back(&b->router());
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
